// step_built.h - the step on the CPU, compiled once per element type for all programs that train
//   make compiles this file into build/step_float.o, step_double.o and so on; STEP_OF is the type.
//   A program that links these objects includes the file too, and then only declares the step's
//   templates. `make STEPS=` and nvcc compile each program whole, without this file.
#pragma once
#include "step.h"

namespace llmc {

#ifdef STEP_OF
template void run_action(Trainer<STEP_OF, Cpu>&, const Action&);
template void run_actions(Trainer<STEP_OF, Cpu>&, Part);
#else
extern template void run_action(Trainer<float, Cpu>&, const Action&);
extern template void run_actions(Trainer<float, Cpu>&, Part);
extern template void run_action(Trainer<double, Cpu>&, const Action&);
extern template void run_actions(Trainer<double, Cpu>&, Part);
extern template void run_action(Trainer<bf16, Cpu>&, const Action&);
extern template void run_actions(Trainer<bf16, Cpu>&, Part);
extern template void run_action(Trainer<fp16, Cpu>&, const Action&);
extern template void run_actions(Trainer<fp16, Cpu>&, Part);
#endif

} // namespace llmc
