// price.h - what a run takes on a machine: hours, money, energy, CO2e
//   hours      of the clock, by the simulator's step: nothing is saved, lost or repeated
//   card-hours hours * cards
//   money      card-hours * dollars_hour
//   energy     card-hours * (watts + host_watts) * pue / 1000 kWh. Cards draw their limit all the
//              time, which is more than a run draws whose cards wait
//   CO2e       energy * grid_g / 1000 kg
//   A number that nobody gave is 0, or a PUE of 1. It is not printed, and the last line names it.
//   Only watts come with the table of machines; prices and grids change by place and year: a
//   machine's FILE has them.
#pragma once
#include "../text.h"
#include "../io/machine.h"

namespace llmc {

struct RunPrice {
    double hours, card_hours, dollars, kwh, kg;
};

// Price `seconds` on `cards` cards of a machine.
inline RunPrice run_price(const Machine& m, double seconds, double cards) {
    RunPrice p = {};
    p.hours = seconds / 3600;
    p.card_hours = p.hours * cards;
    p.dollars = p.card_hours * m.dollars_hour;
    p.kwh = m.watts > 0 ? p.card_hours * (m.watts + m.host_watts) * m.pue / 1000 : 0;
    p.kg = p.kwh * m.grid_g / 1000;
    return p;
}

// An amount as text, to two digits at least.
inline std::string amount_text(double x) {
    char text[32];
    snprintf(text, sizeof(text), x < 0.1 ? "%.2g" : x < 100 ? "%.2f" : "%.0f", x);
    return text;
}

// Write the amounts of a run of `steps` steps, each with the numbers that it stands on. The last
// line names the numbers that would say more.
inline std::string price_text(const Machine& m, double seconds, double cards, int64_t steps) {
    RunPrice p = run_price(m, seconds, cards);
    std::string text = concat("  ", steps, " steps: ", amount_text(p.hours), " hours, ",
                              amount_text(p.card_hours), " card-hours, if nothing is lost\n");

    // Note a number as missing where nobody gave it.
    std::string missing;
    auto given = [&](double number, const char* key, double none = 0) {
        if (number <= none) missing += concat(missing.empty() ? "" : ", ", key);
        return number > none;
    };

    // Money.
    if (given(m.dollars_hour, "dollars_hour"))
        text += concat("  $", amount_text(p.dollars), " at ", m.dollars_hour, " a card-hour\n");

    // Energy, with the host's part and the building's.
    bool watts = given(m.watts, "watts");
    std::string more;
    if (given(m.host_watts, "host_watts"))
        more += concat(", ", m.host_watts, " W of the host to each");
    if (given(m.pue, "pue", 1))
        more += concat(", PUE ", m.pue);
    if (watts)
        text += concat("  ", amount_text(p.kwh), " kWh of cards at their limit of ", m.watts, " W",
                       more, "\n");

    // CO2e.
    if (given(m.grid_g, "grid_g") && watts)
        text += concat("  ", amount_text(p.kg), " kg CO2e at ", m.grid_g, " g/kWh\n");
    return missing.empty() ? text : text + "  a machine's FILE may add: " + missing + "\n";
}

} // namespace llmc
