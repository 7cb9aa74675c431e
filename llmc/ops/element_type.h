// element_type.h - an element type as a value, with its bytes and name, for tables and files
//   To copy: this file and types.h.
#pragma once
#include "types.h"

namespace llmc {

enum class Type : uint8_t { F32, BF16, F16, F64 };

struct TypeRow {
    size_t bytes;
    const char* name; // as in the headers of safetensors files
};

// There is no default case: the compiler warns of a missing type, and at run time die() reports it.
inline TypeRow type_row(Type t) {
    switch (t) {
    case Type::F32: return {4, "F32"};
    case Type::BF16: return {2, "BF16"};
    case Type::F16: return {2, "F16"};
    case Type::F64: return {8, "F64"};
    }
    die("an element type without a row in type_row()");
}

// The bytes and the name of a type.
inline size_t type_bytes(Type t) { return type_row(t).bytes; }
inline const char* type_name(Type t) { return type_row(t).name; }

// The Type of a C++ type.
template <typename T> LLMC_HD constexpr Type type_of();
template <>
LLMC_HD constexpr Type type_of<float>() { return Type::F32; }
template <>
LLMC_HD constexpr Type type_of<double>() { return Type::F64; }
template <>
LLMC_HD constexpr Type type_of<bf16>() { return Type::BF16; }
template <>
LLMC_HD constexpr Type type_of<fp16>() { return Type::F16; }
#if defined(__CUDA_BF16_H__) && defined(__CUDA_FP16_H__)
template <>
LLMC_HD constexpr Type type_of<__nv_bfloat16>() { return Type::BF16; }
template <>
LLMC_HD constexpr Type type_of<__half>() { return Type::F16; }
#endif

} // namespace llmc
