"""Where the reference files of other projects are, for Python: $FIXTURES, or as testing.h says."""
import os

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_here = os.path.join(ROOT, "fixtures")
FIXTURES = os.environ.get("FIXTURES") or (_here if os.path.exists(_here) else os.path.join(ROOT, "../shared/fixtures"))
