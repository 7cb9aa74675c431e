// links.h - the rates at which a group's ranks send: inside a node, and by NICs - arXiv:2104.04473
//   all-reduce                  a + 2 (n-1)/n S/ring; it has trees, which need few hops
//   all-gather, reduce-scatter  a + (n-1)/n S/ring + (n-1) hops of a ring that leaves a node
//   all-to-all                  a + max(what stays in the node / link, what leaves it / nic)
//   message                     m + S/link, or S/nic across the edge of a node
//   a, m: the latencies of a collective and of a message
//   link: between two cards of a node. nic: of one card's own NIC
//   ring: of the link, or of all NICs that the group's ranks in one node have together: a
//   collective has as many rings as there are NICs. A message to one rank has one NIC.
#pragma once
#include "../io/machine.h"
#include "../layout.h"

namespace llmc {

// A group of n ranks, of which `near` are in one node: the fewest in any, whose NICs bound a ring.
// Rates are in bytes per second, times in seconds. `bytes` counts all shards together, as --explain
// and papers do.
struct Link {
    int n, near;
    double link, nic;
    double latency, message_latency, hop;

    // A ring that leaves a node goes around all its NICs at once; one message has one of them.
    bool leaves_node() const { return near < n; }
    double ring() const { return leaves_node() ? std::min(link, nic * near) : link; }
    double message_rate() const { return leaves_node() ? std::min(link, nic) : link; }

    // The bytes of all shards, given those that a rank sends to all others. Each of these gets a
    // part, and the rank keeps one.
    double whole(double sent) const { return sent * n / (n - 1); }

    // A group of one has all of it already.
    double all_gather(double bytes) const {
        double step = (leaves_node() ? hop : 0) + bytes / n / ring();
        return n > 1 ? latency + (n - 1) * step : 0;
    }
    double all_reduce(double bytes) const {
        return n > 1 ? latency + 2 * double(n - 1) / n * bytes / ring() : 0;
    }
    double all_to_all(double bytes) const {
        // Parts for this node and for others go at once.
        if (n == 1) return 0;
        double part = bytes / n;
        double inside = (near - 1) * part / link;
        double across = (n - near) * part / nic;
        return latency + std::max(inside, across);
    }
    double message(double bytes) const { return message_latency + bytes / message_rate(); }
};

// The link of a group of n ranks, of which `near` or all are in one node.
inline Link link_of(const Machine& machine, int n, int near) {
    return {n, std::min(near, n), machine.link_rate(), machine.nic_rate(),
            machine.latency_us * 1e-6,
            machine.message_us * 1e-6,
            machine.hop_us * 1e-6};
}

// How many of n ranks, `stride` apart from `first` on, a node has: the fewest of those that have
// any of them.
inline int fewest_in_node(int first, int stride, int n, int cards) {
    // Nodes in the middle are full. Those at both ends may have fewer.
    int last = first + (n - 1) * stride;
    if (first / cards == last / cards)
        return n;
    int room = cards - first % cards;
    int head = (room + stride - 1) / stride;
    int tail = last % cards / stride + 1;
    return std::min(head, tail);
}

// How many ranks of an axis stand in one node, of the group that has the fewest. Axes before it in
// the order fill the node first.
inline int axis_in_node(const Layout& layout, const Machine& machine, Axis Layout::*axis) {
    // Compute the stride as layout_at() does.
    int stride = 1;
    for (size_t i = 0; layout.order[i] != axis; i++)
        stride *= (layout.*layout.order[i]).size;
    int n = (layout.*axis).size;
    int cards = int(machine.cards);
    int span = stride * n; // ranks of `stride` groups, which lie between each other
    if (stride >= cards)
        return 1;

    // Most groups fill nodes, or nodes hold whole groups.
    bool whole = cards % span == 0;
    bool fills = cards % stride == 0 && span % cards == 0;
    if (whole || fills)
        return std::min(n, cards / stride);

    // Others begin at different places of a node, which repeat after `cards` spans. The groups of a
    // span lie alike where nodes hold whole strides.
    int fewest = n;
    int alike = cards % stride == 0 ? stride : 1;
    int ranks = std::min(layout.world(), span * cards);
    for (int begin = 0; begin < ranks && fewest > 1; begin += span)
        for (int i = 0; i < stride; i += alike) {
            int here = fewest_in_node(begin + i, stride, n, cards);
            fewest = std::min(fewest, here);
        }
    return fewest;
}
inline Link axis_link(const Layout& layout, const Machine& machine, Axis Layout::*axis) {
    return link_of(machine, (layout.*axis).size, axis_in_node(layout, machine, axis));
}

// How many ranks stand in one node, of those that see other data or route other tokens.
inline int ranks_in_node(const Layout& layout, const Machine& machine, Group group) {
    // Neighbours along cp stay together; so do those along dp if all of cp fits.
    int near = axis_in_node(layout, machine, &Layout::cp) *
               axis_in_node(layout, machine, &Layout::dp);
    bool over_tp = group == Group::EXPERTS && layout.experts.whole;
    if (!over_tp) return near;
    return near * axis_in_node(layout, machine, &Layout::tp);
}

// The links of the ranks that share a bucket, and of those that hold the same shard of it.
struct BucketLinks {
    Link shard, replica;
};
inline BucketLinks bucket_links(const Layout& layout, const Machine& machine, Group group) {
    // The ranks that have the same experts stand ep ranks apart.
    int near = ranks_in_node(layout, machine, group);
    if (group == Group::EXPERTS) near = std::max(1, near / layout.ep);
    int shards = shard_axis(layout, group).size;
    int replicas = replica_axis(layout, group).size;
    return {link_of(machine, shards, near),
            link_of(machine, replicas, std::max(1, near / shards))};
}

} // namespace llmc
