// plan_words.h - the words of actions and data, as --explain, timelines and errors print them
#pragma once
#include <string>
#include "action.h"

namespace llmc {

// The words of a bucket's chunk, after its name.
inline std::string chunk_text(int chunk) {
    if (chunk < 0) return "";
    std::string text = "."; // g++ 12 warns of "." + a text
    return text + std::to_string(chunk);
}

// The word that tells a gradient's moves from those of weights.
inline std::string gradient_text(const Action& a) {
    switch (a.kind) {
    case Kind::GRAD:
    case Kind::GRAD_HERE: return "grad ";
    case Kind::TIED_HERE: return "grad.tied ";
    default: return "";
    }
}

// The words of one action: F(0,3), REDUCE(block.0), SENDRECV(to 1: activation 0.1).
inline std::string action_text(const Action& a, const Model& model) {
    // List the messages of an exchange.
    std::string s = op_name(a.op);
    if (a.op == Op::SENDRECV) {
        std::string list;
        for (const Transfer& t : a.transfers)
            list += (list.empty() ? "" : ", ") + std::string(t.send ? "to " : "from ") +
                    std::to_string(t.peer) + ": " + name_of(t);
        return s + "(" + list + ")";
    }
    // A bucket has a name; layers have numbers.
    if (a.bucket >= 0)
        return s + "(" + gradient_text(a) + model.buckets[a.bucket].name +
               chunk_text(a.chunk) + ")";
    if (a.layer < 0) return s;
    return s + "(" + std::to_string(a.micro) + "," + std::to_string(a.layer) + ")";
}

// The words of a datum, in the same form: stream(0,3), weight(block.0).
inline std::string data_text(Data d, const Model& model) {
    std::string micro = d.micro < 0 ? "" : std::to_string(d.micro), of;
    if (d.of >= 0)
        of = of_bucket(d.kind) ? model.buckets[d.of].name + chunk_text(d.chunk)
                               : std::to_string(d.of);
    std::string comma = micro.empty() || of.empty() ? "" : ",";
    std::string name = kind_name(d.kind);
    return micro.empty() && of.empty() ? name : name + "(" + micro + comma + of + ")";
}

} // namespace llmc
