#!/usr/bin/env python3
"""dev/data/tokenize_chat.py: transformers' tokens and labels, and train_gpt's reading of them.

usage: test/io/tokenize_chat_test.py [TRAIN_GPT]        seconds; `skipped: no transformers` where it is not installed
"""
import json, os, subprocess, sys, tempfile, unittest

os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")
try:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
except ImportError:
    print("skipped: no transformers\n0 failed, 1 skipped")
    sys.exit(0)

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAM = os.path.abspath(sys.argv.pop(1)) if len(sys.argv) > 1 else os.path.join(ROOT, "build/train_gpt")
CHATML = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' "
          "%}GENERATION{{message['content'] + '<|im_end|>'}}END{{'\n'}}{% else %}{{message['content'] + '<|im_end|>\n'"
          "}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
MARKED = CHATML.replace("GENERATION", "{% generation %}").replace("END", "{% endgeneration %}")
PLAIN = CHATML.replace("GENERATION", "").replace("END", "")
TALK = [{"role": "system", "content": "S"}, {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."},
        {"role": "user", "content": "You?"}, {"role": "assistant", "content": "Yes, I."}]


class TokenizeChat(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def model(self, template):
        """A folder with a token a byte, and two special ones."""
        vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        t = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        t.decoder = decoders.ByteLevel()
        t = PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<|im_end|>")
        t.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
        t.chat_template = template
        t.save_pretrained(self.folder)
        return t

    def run_script(self, *talks, template):
        t = self.model(template)
        source, target = os.path.join(self.folder, "in.jsonl"), os.path.join(self.folder, "out.jsonl")
        with open(source, "w") as f:
            f.writelines(json.dumps({"messages": talk}) + "\n" for talk in talks)
        r = subprocess.run([sys.executable, os.path.join(ROOT, "dev/data/tokenize_chat.py"), self.folder, source, target],
                           capture_output=True, text=True)
        rows = []
        if r.returncode == 0:
            with open(target) as f:
                rows = [json.loads(line) for line in f]
        return t, rows, r.stdout + r.stderr

    def test_answers_are_trained_with_the_token_that_ends_them_and_nothing_else(self):
        for template in (MARKED, PLAIN):
            t, rows, said = self.run_script(TALK, template=template)
            ids, labels = rows[0]["input_ids"], rows[0]["labels"]
            self.assertEqual(ids, t.apply_chat_template(TALK, return_dict=True)["input_ids"])
            self.assertEqual(len(ids), len(labels))
            self.assertTrue(all(label in (-100, token) for token, label in zip(ids, labels)))
            trained = t.decode([label for label in labels if label >= 0])
            self.assertEqual(trained, "I.<|im_end|>Yes, I.<|im_end|>")
            self.assertIn("1 conversations; 0 answers are not trained", said)

    def test_an_answer_that_changes_later_is_not_trained_and_it_is_said(self):
        changes = PLAIN.replace("{{message['content'] + '<|im_end|>'}}{{'\n'}}",
                                "{{message['content'] if loop.last else '...'}}{{'<|im_end|>\n'}}")
        self.assertNotEqual(changes, PLAIN)
        t, rows, said = self.run_script(TALK, TALK[:2], template=changes)
        self.assertEqual(t.decode([label for label in rows[0]["labels"] if label >= 0]), "Yes, I.<|im_end|>")
        self.assertIn("1 conversations; 1 answers are not trained", said)
        self.assertIn("1 lines without an answer are left out", said)

    def test_a_template_that_refuses_names_the_line(self):
        t, rows, said = self.run_script(TALK, template="{{ raise_exception('no system text') }}")
        self.assertIn("in.jsonl:1: TemplateError: no system text", said)

    @unittest.skipUnless(os.path.exists(PROGRAM), "skipped: no train_gpt")
    def test_train_gpt_reads_the_tokens_that_it_writes_itself(self):
        t, rows, said = self.run_script(TALK, TALK[1:3], template=PLAIN)
        read = []
        for data, more in (("in.jsonl", ["--chat-format", "chatml"]), ("out.jsonl", [])):
            out = os.path.join(self.folder, data + ".bin")
            r = subprocess.run([os.path.join(os.path.dirname(PROGRAM), "prepare_gpt"), out, "--loss", "sft", "--seq", "128", "--tokenizer",
                                os.path.join(self.folder, "tokenizer.json"), "--data",
                                os.path.join(self.folder, data), *more], capture_output=True, text=True)
            self.assertEqual(r.returncode, 0, r.stdout + r.stderr)
            with open(out, "rb") as f:
                read.append(f.read()[1024:])

        # Both conversations lie in one window, and padding behind them.
        both = 4 * sum(len(row["input_ids"]) for row in rows)
        self.assertEqual(len(read[0]), 4 * 128)
        self.assertEqual(read[0][:both], read[1][:both])


if __name__ == "__main__":
    unittest.main()
