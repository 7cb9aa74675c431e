// test_dialects.cpp - ways to store weights besides plain safetensors, a file of tests for each
#include "dialect_bitsandbytes.h"
#include "dialect_gptq.h"
#include "dialect_merged.h"
#include "dialect_mxfp4.h"
