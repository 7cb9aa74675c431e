// numbers.h - counts, bytes and times as people read them
//   To copy: this file.
#pragma once
#include <cstdio>
#include <string>

namespace llmc {

// Write a number in the largest unit in which it is at least 1, with `digits` digits after the
// point. The first unit has none.
inline std::string in_units(double x, double step, const char* const* units, int count,
                            int digits) {
    int unit = 0;
    for (; unit + 1 < count && x >= step; unit++)
        x /= step;
    char text[64];
    snprintf(text, sizeof(text), "%.*f%s", unit ? digits : 0, x, units[unit]);
    return text;
}

// A count: 405.9B, 124.4M, 83.2k, 512
inline std::string count_text(double n) {
    static const char* const units[] = {"", "k", "M", "B", "T"};
    return in_units(n, 1000, units, 5, 1);
}

// A size: 6.7 TiB, 20.3 GiB, 512 bytes
inline std::string bytes_text(double bytes) {
    static const char* const units[] = {" bytes", " KiB", " MiB", " GiB", " TiB", " PiB"};
    return in_units(bytes, 1024, units, 6, 1);
}

// A number beyond all units: 7.945e18
inline std::string power_text(double x) {
    char text[32];
    snprintf(text, sizeof(text), "%.3e", x);
    std::string all = text;
    size_t plus = all.find("e+");
    return plus == std::string::npos ? all : all.erase(plus + 1, 1);
}

// A time: 2h03m, 1m20s, 7s
inline std::string duration_text(double seconds) {
    char text[32];
    // Two units are enough: an estimate is no more precise.
    long s = long(seconds + 0.5);
    if (s >= 3600)
        snprintf(text, sizeof(text), "%ldh%02ldm", s / 3600, s / 60 % 60);
    else if (s >= 60)
        snprintf(text, sizeof(text), "%ldm%02lds", s / 60, s % 60);
    else
        snprintf(text, sizeof(text), "%lds", s);
    return text;
}

// A rate: 1.20M, 83.2k, 512
inline std::string rate_text(double per_second) {
    char text[32];
    if (per_second >= 1e6)
        snprintf(text, sizeof(text), "%.2fM", per_second / 1e6);
    else if (per_second >= 1e3)
        snprintf(text, sizeof(text), "%.1fk", per_second / 1e3);
    else
        snprintf(text, sizeof(text), "%.0f", per_second);
    return text;
}

} // namespace llmc
