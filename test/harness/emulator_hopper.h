// emulator_hopper.h - models of hopper.cuh's wrappers: mbarrier, TMA, wgmma, proxy fences
//   An asynchronous operation happens when it is issued or, with settings.latest, when the program
//   waits for it. Until then there is NaN where it will write, and it reads its inputs only when it
//   happens, so a missing wait shows in the result. With settings.latest:
//     TMA load        lands when a thread waits on its mbarrier
//     store, reduce   reads shared memory at bulk_wait_read, writes global memory at bulk_wait, or
//                     when the launch ends, the last one first
//     wgmma           reads its operands and writes its accumulators at the wg_wait that covers it
//   Shared memory has two views: memory itself and the asynchronous proxy's. The proxy sees its own
//   writes and whatever fence_async_smem() has shown it. If the two views differ on an operand of a
//   store or product, the operand was written without a fence. A fence shows everything that any
//   thread has written until then; a writer without a fence is found in another thread order.
//   Swizzle, descriptors and fragments follow the PTX manual (ISA 8.7: Tensors, wgmma).
//   It cannot show orders that only weak memory has, or what the hardware does where the manual
//   leaves it open.
#pragma once
#include <climits>
#include <deque>

namespace emulator {

// ----------------------------------------------------------------------------
// addresses in shared memory's own space; as on the GPU, they do not start at 0

constexpr uint32_t SHARED_BASE = 1024;

// The address of p in shared memory's space. Both directions report what lies outside the block.
inline uint32_t shared_address(const void* p, const Site& site) {
    Unseen unseen;
    ptrdiff_t at = static_cast<const unsigned char*>(p) - self().block->arena;
    if (at >= 0 && at < ptrdiff_t(ARENA_BYTES)) return uint32_t(at) + SHARED_BASE;
    error(site, "%p is not in this block's shared memory", p);
    return SHARED_BASE;
}
inline unsigned char* shared_pointer(uint32_t address, const Site& site) {
    Unseen unseen;
    Block& b = *self().block;
    if (address >= SHARED_BASE && address - SHARED_BASE < b.arena_used)
        return b.arena + (address - SHARED_BASE);
    error(site, "an operand at shared address %u, beyond the block's shared memory", address);
    return b.arena;
}
// The 128-byte swizzle of an address: the number of its row of 128 bytes, modulo 8, is xored into
// the number of its chunk of 16 bytes.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// ----------------------------------------------------------------------------
// the asynchronous proxy's view of shared memory

#define EMULATOR_RAW __attribute__((no_sanitize("thread", "address", "undefined"), noinline))

// The view starts as shared memory does: all ones.
inline unsigned char* async_view(Block& b) {
    if (b.async_view.empty()) b.async_view.assign(ARENA_BYTES, 0xff);
    return b.async_view.data();
}

// Copy, or compare, bytes where the sanitizers must not look: neither is an access of the kernel.
EMULATOR_RAW inline void copy_raw(unsigned char* to, const unsigned char* from, size_t bytes) {
    typedef uint64_t Wide __attribute__((vector_size(32), aligned(1), may_alias));
    size_t i = 0;
    for (; i + 32 <= bytes; i += 32)
        *reinterpret_cast<Wide*>(to + i) = *reinterpret_cast<const Wide*>(from + i);
    for (; i < bytes; i++) to[i] = from[i];
}
EMULATOR_RAW inline bool same_raw(const unsigned char* a, const unsigned char* b, size_t bytes) {
    bool same = true;
    for (size_t i = 0; i < bytes; i++) same &= a[i] == b[i];
    return same;
}
// The proxy has written these bytes, so it sees them.
inline void show_async(Block& b, const unsigned char* p, size_t bytes) {
    Unseen unseen;
    copy_raw(async_view(b) + (p - b.arena), p, bytes);
}
// The proxy reads these bytes. Report them if it has not been shown how they are now.
inline void check_shown(Block& b, const unsigned char* p, size_t bytes, const char* what,
                        const Site& site) {
    Unseen unseen;
    if (same_raw(async_view(b) + (p - b.arena), p, bytes)) return;
    error(site,
          "%s reads shared memory at +%zu that was written with no fence_async_smem() after it",
          what, size_t(p - b.arena));
    copy_raw(async_view(b), b.arena, b.arena_used); // one message for each missing fence is enough
}

// ----------------------------------------------------------------------------
// tensor maps and tiles

} // namespace emulator

// A tensor in global memory and the box that one load or store moves, as the driver's type.
struct alignas(64) CUtensorMap {
    unsigned char* base;
    unsigned rank, element;       // element: its size in bytes
    uint64_t dims[5], strides[5]; // innermost first; strides in bytes
    unsigned box[5];
    bool swizzle; // the 128-byte pattern, or none
};

namespace emulator {

inline std::atomic<long> encoded_maps = 0; // how often the driver would have made one

// The bytes of a tile.
inline size_t box_bytes(const CUtensorMap& m) {
    size_t bytes = m.element;
    for (unsigned d = 0; d < m.rank; d++) bytes *= m.box[d];
    return bytes;
}

// Call f(offset in the tile, address in global memory or null, bytes) for each piece of a tile. A
// piece is a chunk of 16 bytes, or one element where the tensor ends inside a chunk; null marks a
// piece beyond the tensor. `at`: the tile's first coordinates. `address`: where the tile lies in
// shared memory, which decides its swizzle.
template <typename F>
void walk_tile(const CUtensorMap& m, const int (&at)[5], uint32_t address, F f) {
    size_t row_bytes = m.box[0] * m.element, rows = box_bytes(m) / row_bytes;
    for (size_t row = 0; row < rows; row++) {
        // Find the row in global memory. It may lie beyond the tensor.
        unsigned char* from = m.base;
        bool inside = true;
        size_t rest = row;
        for (unsigned d = 1; d < m.rank; d++, rest /= m.box[d - 1]) {
            int64_t c = int64_t(at[d]) + int64_t(rest % m.box[d]);
            inside &= c >= 0 && c < int64_t(m.dims[d]);
            from += c * int64_t(m.strides[d]);
        }

        // Cut the row into chunks, and into elements where the tensor ends inside a chunk.
        for (size_t byte = 0; byte < row_bytes;) {
            auto real = [&](size_t b) {
                int64_t c = int64_t(at[0]) + int64_t(b / m.element);
                return inside && c >= 0 && c < int64_t(m.dims[0]);
            };
            size_t bytes = row_bytes - byte < 16 ? row_bytes - byte : 16;
            if (real(byte) != real(byte + bytes - 1)) bytes = m.element;
            uint32_t to = address + uint32_t(row * row_bytes + byte);
            if (m.swizzle) to = swizzled(to);
            f(to - address,
              real(byte) ? from + (int64_t(at[0]) * m.element + int64_t(byte)) : nullptr, bytes);
            byte += bytes;
        }
    }
}

// Check that the coordinates fit the map, and that the tile is aligned: to 128 bytes, or to 1024
// with a swizzle.
inline void check_tile(const CUtensorMap& m, unsigned rank, uint32_t address, const char* what,
                       const Site& site) {
    if (m.rank != rank) error(site, "%s: %u coordinates, the map has %u", what, rank, m.rank);
    if (address % 128) error(site, "%s: a tile at +%u is not 128-byte aligned", what, address);
    if (m.swizzle && address % 1024)
        error(site, "%s: a swizzled tile at +%u is not 1024-byte aligned", what, address);
}

// ----------------------------------------------------------------------------
// mbarriers, and the loads that complete on them

// A bulk load: of a tile, or of `bytes` consecutive bytes.
struct Load {
    Block* block; // its shared memory is the destination
    unsigned char* to;
    uint32_t address, bytes;
    bool tile;
    CUtensorMap map;           // for a tile
    int at[5];                 // for a tile
    const unsigned char* from; // for consecutive bytes
    // Write the bytes to shared memory; elements beyond the tensor become 0.
    void run() const {
        if (!tile) {
            memcpy(to, from, bytes);
        } else {
            walk_tile(map, at, address, [this](size_t offset, const unsigned char* x, size_t n) {
                x ? memcpy(to + offset, x, n) : memset(to + offset, 0, n);
            });
        }
        show_async(*block, to, bytes);
    }
};

// A phase is over when all arrivals have come and no expected byte is missing.
struct Mbarrier {
    unsigned count, pending; // arrivals in a phase, and how many of them are missing
    int64_t bytes = 0;       // expected and not loaded yet
    uint64_t phase = 0;
    bool fenced = false; // mbar_init_fence() came after mbar_init()
    unsigned owner;      // the thread that made it
    Site site;
    std::vector<Load> loads; // in flight
    char order[2];           // for ThreadSanitizer, as in Barrier

    void complete_if_over() {
        if (pending || bytes) return;
        phase++;
        pending = count;
    }

    // Run the loads in flight, and count their bytes.
    void land() {
        Unseen unseen;
        std::vector<Load> now = std::move(loads);
        loads.clear();
        for (const Load& load : now) {
            load.run();
            bytes -= load.bytes;
        }
        if (!now.empty()) complete_if_over();
    }
};

// Check that no load is still to write the shared memory of a block that ends.
inline void block_ends(Block& b) {
    for (auto& [address, object] : b.objects) {
        const Mbarrier& bar = *static_cast<Mbarrier*>(object.get());
        if (!bar.loads.empty())
            error(bar.site, "block (%u,%u,%u) ends before a load on this mbarrier has landed",
                  b.index.x, b.index.y, b.index.z);
    }
}

// The mbarrier at an address, or null after a message.
inline Mbarrier* find_mbarrier(Block& b, const uint64_t* p, const char* what, const Site& site) {
    // Read the word in shared memory. mbar_init() alone writes it, so ThreadSanitizer reports a use
    // that nothing orders after the initialisation.
    (void)*static_cast<const volatile uint64_t*>(p);
    Unseen unseen;
    auto found = b.objects.find(p);
    if (found == b.objects.end()) {
        error(site, "%s: no mbarrier has been initialised there", what);
        return nullptr;
    }
    Mbarrier* bar = static_cast<Mbarrier*>(found->second.get());
    if (!bar->fenced)
        error(site, "%s: mbar_init() at %s has had no mbar_init_fence()", what,
              where(bar->site).c_str());
    bar->fenced = true; // one message is enough
    return bar;
}

// Count one arrival, and the bytes that it expects.
inline void mbarrier_arrive(Mbarrier& bar, int64_t bytes, const char* what, const Site& site) {
    Unseen unseen;
    EMULATOR_TSAN(__tsan_release(&bar.order[bar.phase & 1]);)
    if (bar.pending == 0)
        return error(site, "%s: more than %u arrivals in a phase", what, bar.count);
    bar.bytes += bytes;
    bar.pending--;
    bar.complete_if_over();
}

// Issue a load. It happens now, or with settings.latest when a thread waits on its mbarrier.
inline void start_load(Load load, uint64_t* p, const char* what, const Site& site) {
    Mbarrier* bar = find_mbarrier(*load.block, p, what, site);
    if (!bar) return;
    if (load.address - SHARED_BASE + load.bytes > load.block->arena_used)
        return error(site, "%s: %u bytes at +%u go beyond the block's shared memory", what,
                     load.bytes, load.address - SHARED_BASE);

    // Load the bytes, or write NaN until they land.
    if (settings.latest) {
        memset(load.to, 0xff, load.bytes);
        show_async(*load.block, load.to, load.bytes);
    } else {
        load.run();
    }

    // Count the bytes as loaded, or as in flight.
    Unseen unseen;
    EMULATOR_TSAN(__tsan_release(&bar->order[bar->phase & 1]);)
    if (settings.latest) {
        bar->loads.push_back(load);
    } else {
        bar->bytes -= load.bytes;
        bar->complete_if_over();
    }
}

// Issue a load of the tile whose first element has the coordinates `at`, innermost first.
inline void load_tile(void* to, const CUtensorMap* m, uint64_t* bar, unsigned rank,
                      const int (&at)[5], const char* what, const Site& site) {
    uint32_t address = shared_address(to, site);
    check_tile(*m, rank, address, what, site);
    Load load = {self().block,
                 static_cast<unsigned char*>(to),
                 address,
                 uint32_t(box_bytes(*m)),
                 true,
                 *m,
                 {at[0], at[1], at[2], at[3], at[4]},
                 nullptr};
    start_load(load, bar, what, site);
}

// ----------------------------------------------------------------------------
// bulk stores and reductions: each thread has its own, committed in groups

// A bulk store, or a reduction that adds floats. It reads shared memory first and writes
// global memory later.
struct Store {
    // add: to add floats, instead of writing bytes. read: shared memory has been read into `data`.
    bool tile, add, read = false;
    CUtensorMap map;   // for a tile
    int at[5];         // for a tile
    unsigned char* to; // for consecutive bytes
    const unsigned char* from;
    uint32_t address, bytes;
    Site site;
    std::vector<unsigned char> data;

    // Read the source once, and check that the proxy sees it.
    void read_shared() {
        if (read) return;
        read = true;
        data.assign(from, from + bytes);
        check_shown(*self().block, from, bytes, "a bulk store", site);
    }
    // Write or add n bytes. The additions of several blocks may meet, so each is atomic.
    static void put(unsigned char* to, const unsigned char* x, size_t n, bool add) {
        if (!add) {
            memcpy(to, x, n);
            return;
        }
        for (size_t i = 0; i < n; i += 4) {
            float value;
            memcpy(&value, x + i, 4);
            std::atomic_ref<float>(*reinterpret_cast<float*>(to + i))
                .fetch_add(value, std::memory_order_relaxed);
        }
    }
    // Write the destination; elements beyond the tensor are left out.
    void write_global() {
        read_shared();
        if (!tile) return put(to, data.data(), bytes, add);
        walk_tile(map, at, address, [this](size_t offset, unsigned char* x, size_t n) {
            if (x) put(x, data.data() + offset, n, add);
        });
    }
};
struct StoreGroup {
    std::vector<Store> stores;
    bool read = false; // a bulk_wait_read() has covered it
};
struct Stores {
    std::vector<Store> open; // the group that is not committed yet
    std::deque<StoreGroup> groups;
};

inline void thread_returns(Fiber& f);
// The running thread's stores. The first call makes thread_returns() check them at the end.
inline Stores& my_stores() {
    Unseen unseen;
    Fiber& f = self();
    if (!f.stores) {
        f.stores = std::make_shared<Stores>();
        f.at_return = thread_returns;
    }
    return *static_cast<Stores*>(f.stores.get());
}

// Issue a store. It happens now, or with settings.latest when the thread waits for its group.
inline void start_store(Store s, const char* what) {
    if (s.address - SHARED_BASE + s.bytes > self().block->arena_used)
        return error(s.site, "%s: %u bytes at +%u go beyond the block's shared memory", what,
                     s.bytes, s.address - SHARED_BASE);
    if (!settings.latest) s.write_global();
    Unseen unseen;
    my_stores().open.push_back(std::move(s));
}

// Issue a store of the tile whose first element has the coordinates `at`, innermost first.
inline void store_tile(const CUtensorMap* m, const void* from, unsigned rank,
                       const int (&at)[5], const char* what, const Site& site) {
    uint32_t address = shared_address(from, site);
    check_tile(*m, rank, address, what, site);
    Store s = {true,
               false,
               false,
               *m,
               {at[0], at[1], at[2], at[3], at[4]},
               nullptr,
               static_cast<const unsigned char*>(from),
               address,
               uint32_t(box_bytes(*m)),
               site,
               {}};
    start_store(s, what);
}
// Check a copy without a map: both addresses and the size must be multiples of 16.
inline void check_bulk(const void* shared, const void* global, uint32_t bytes, const char* what,
                       const Site& site) {
    if (uintptr_t(shared) % 16 || uintptr_t(global) % 16 || bytes % 16 || bytes == 0)
        error(site, "%s: %u bytes, from or to %p and %p: all must be multiples of 16", what, bytes,
              shared, global);
}

// ----------------------------------------------------------------------------
// wgmma: 64 rows of a and d, 16 for each warp. Lanes 4 g to 4 g + 3 hold rows g and g + 8 of them,
// and each of these lanes holds two of every 8 columns.

// An operand in shared memory, decoded from the descriptor's 64 bits.
struct Descriptor {
    uint32_t start, leading, stride; // bytes
    bool mn_major;
    explicit Descriptor(uint64_t x = 0, bool mn = false)
        : start(uint32_t(x & 0x3fff) << 4),
          leading(uint32_t(x >> 16 & 0x3fff) << 4),
          stride(uint32_t(x >> 32 & 0x3fff) << 4),
          mn_major(mn) {}
    // The shared address of the element in row i of the operand, at index k of the sum.
    uint32_t address(uint32_t i, uint32_t k) const {
        return swizzled(mn_major
                            ? start + i / 64 * leading + k / 8 * stride + k % 8 * 128 + i % 64 * 2
                            : start + i / 8 * stride + i % 8 * 128 + k * 2);
    }
};

struct QuadRegisters { // the registers of a in the four lanes that share a row
    uint32_t a[4][4];
};
// One wgmma as a thread sees it: 64 rows and N columns, summed over 16. a comes from registers or,
// like b, from shared memory; `number` converts 16 bits to float.
struct Product64 {
    float* d;
    unsigned N;
    bool accumulate, from_registers;
    uint64_t a, b;
    bool a_mn, b_mn;
    const uint32_t* registers;
    QuadRegisters quad;
    float (*number)(uint16_t);
    Site site;
};
// A thread's products: issued, then committed in groups, then waited for.
struct Products {
    bool fenced = false; // wg_fence() came since the registers could last be touched
    size_t issued = 0;
    std::vector<Product64> open; // the group that is not committed yet
    std::deque<std::vector<Product64>> groups;
    std::map<float*, std::vector<float>> results; // values of accumulators that are NaN for now
};
inline Products& my_products() {
    Unseen unseen;
    Fiber& f = self();
    if (!f.products) {
        f.products = std::make_shared<Products>();
        f.at_return = thread_returns;
    }
    return *static_cast<Products*>(f.products.get());
}

// One element of an operand in shared memory. Report a value that the asynchronous proxy has
// not been shown.
inline float operand(const Product64& p, const Descriptor& d, uint32_t i, uint32_t k, Block& b,
                     const unsigned char* view) {
    uint32_t offset = d.address(i, k) - SHARED_BASE;
    if (offset >= b.arena_used) {
        shared_pointer(offset + SHARED_BASE, p.site); // reports it
        offset = 0;
    }
    uint16_t x = *reinterpret_cast<const uint16_t*>(b.arena + offset), shown;
    memcpy(&shown, view + offset, 2);
    if (x != shown) check_shown(b, b.arena + offset, 2, "wgmma", p.site);
    return p.number(x);
}

// The registers of a that the four lanes of a row hold. Each lane gets all four.
inline QuadRegisters exchange_registers(const Product64& p, const Site& site) {
    return warp_operation(
        0xffffffffu, "wgmma", p.registers,
        [](unsigned lane, const Lanes<const uint32_t*>& all) {
            QuadRegisters quad;
            for (unsigned l = 0; l < 4; l++) memcpy(quad.a[l], all[lane / 4 * 4 + l], 16);
            return quad;
        },
        site);
}

// Compute this thread's part of a product: two rows and N / 4 columns, added to or put into d.
inline void multiply(float* d, const Product64& p) {
    unsigned thread = thread_number() % 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    float a[2][16], b[64][16];
    Descriptor da(p.a, p.a_mn), db(p.b, p.b_mn);
    Block& block = *self().block;
    const unsigned char* view;
    {
        Unseen unseen;
        view = async_view(block);
    }

    // Read the thread's two rows of a, from registers or from shared memory, and its columns of b.
    for (unsigned k = 0; k < 16; k++)
        for (unsigned r = 0; r < 2; r++)
            a[r][k] = p.from_registers
                          ? p.number(uint16_t(p.quad.a[k % 8 / 2][k / 8 * 2 + r] >> (16 * (k % 2))))
                          : operand(p, da, row + 8 * r, k, block, view);
    for (unsigned c = 0; c < p.N / 4; c++)
        for (unsigned k = 0; k < 16; k++)
            b[c][k] = operand(p, db, c / 2 * 8 + lane % 4 * 2 + c % 2, k, block, view);

    // Sum in the order of k.
    for (unsigned c = 0; c < p.N / 4; c++)
        for (unsigned r = 0; r < 2; r++) {
            float sum = 0, &to = d[c / 2 * 4 + r * 2 + c % 2];
            for (unsigned k = 0; k < 16; k++) sum += a[r][k] * b[c][k];
            to = p.accumulate ? to + sum : sum;
        }
}

// Report a descriptor of a kind that this file does not model.
inline void check_descriptor(uint64_t x, bool mn, const char* which, const Site& site) {
    Descriptor d(x, mn);
    if (x >> 62 != 1)
        error(site, "wgmma: operand %s: only the 128-byte swizzle is modelled", which);
    if (d.start & 0x380 || x >> 49 & 7)
        error(site, "wgmma: operand %s starts in row %u of a swizzle's 8", which, d.start >> 7 & 7);
}

// Check that the four warps of a warpgroup issue the same products in the same order.
inline void check_warpgroup(Products& mine, const Product64& p, const Site& site) {
    Unseen unseen;
    std::vector<uint64_t>& log = self().block->wgmma_log[thread_number() / 128 % 8];
    // Fold what the warps must agree on into one word, and hold it against the first warp's.
    uint64_t word = p.a * 31 ^ p.b * 0x9e3779b97f4a7c15ull ^ (p.N * 2 + p.accumulate);
    if (mine.issued == log.size()) log.push_back(word);
    if (log[mine.issued++] != word)
        error(site, "wgmma: the warps of a warpgroup disagree on product %zu", mine.issued - 1);
}

// Issue a product. It happens now, or with settings.latest at the wait that covers its group.
inline void issue_product(Product64 p, const Site& site) {
    Products& mine = my_products();

    // Check what a GPU takes on trust: the same descriptors in all lanes, a whole warpgroup,
    // a fence before.
    uint64_t first = warp_operation(
        0xffffffffu, "wgmma", p.a ^ p.b,
        [](unsigned, const Lanes<uint64_t>& all) { return all[0]; }, site);
    if (first != (p.a ^ p.b)) error(site, "wgmma: the lanes of a warp bring different descriptors");
    if (block_size().x < 128) error(site, "wgmma: a block of fewer than 128 threads");
    if (!mine.fenced) error(site, "wgmma: no wg_fence() since its registers could be touched");
    mine.fenced = true; // one message for each missing fence is enough
    if (!p.from_registers) check_descriptor(p.a, p.a_mn, "a", site);
    check_descriptor(p.b, p.b_mn, "b", site);
    check_warpgroup(mine, p, site);

    // Multiply now, or set the accumulators' values aside and leave NaN until the wait.
    if (!settings.latest) {
        if (p.from_registers) p.quad = exchange_registers(p, site);
        multiply(p.d, p);
    } else if (!mine.results.count(p.d)) { // an earlier product has not set them aside already
        mine.results[p.d].assign(p.d, p.d + p.N / 2);
        memset(p.d, 0xff, p.N / 2 * sizeof(float));
    }
    mine.open.push_back(p);
}

// Wait until at most `left` of this thread's groups are in flight.
inline void wait_products(size_t left, const Site& site) {
    Products& mine = my_products();
    mine.fenced = false;
    if (!mine.open.empty())
        error(site, "wg_wait(): products at %s are not committed",
              where(mine.open[0].site).c_str());

    // Run the products of the groups that are waited for.
    for (; mine.groups.size() > left; mine.groups.pop_front()) {
        if (!settings.latest) continue;
        for (Product64& p : mine.groups.front()) {
            if (p.from_registers) p.quad = exchange_registers(p, site);
            multiply(mine.results[p.d].data(), p);
        }
    }
    syncwarp(0xffffffffu, site); // by now every lane has read its operands
    if (!settings.latest) return;

    // Give back the accumulators that no product in flight will add to.
    auto in_flight = [&](float* d) {
        bool found = false;
        for (Product64& p : mine.open) found |= p.d == d;
        for (auto& group : mine.groups)
            for (Product64& p : group) found |= p.d == d;
        return found;
    };
    for (auto r = mine.results.begin(); r != mine.results.end();) {
        if (in_flight(r->first)) {
            ++r;
        } else {
            std::copy(r->second.begin(), r->second.end(), r->first);
            r = mine.results.erase(r);
        }
    }
}

// Check that a returning thread leaves no work unfinished, and delay its last stores to the end
// of the launch.
inline void thread_returns(Fiber& f) {
    // No product may be in flight.
    if (f.products) {
        Products& p = *static_cast<Products*>(f.products.get());
        p.groups.push_back(std::move(p.open));
        for (const std::vector<Product64>& group : p.groups)
            if (!group.empty())
                return error(group[0].site, "a thread returns with products in flight");
    }
    if (!f.stores) return;

    // Stores must have read shared memory. They may write global memory until the launch ends.
    Stores& s = *static_cast<Stores*>(f.stores.get());
    if (!s.open.empty())
        error(s.open[0].site, "a thread returns with a bulk store that it has not committed");
    for (StoreGroup& group : s.groups) {
        if (!group.read && !group.stores.empty())
            error(
                group.stores[0].site,
                "a thread returns with no bulk_wait_read() after a bulk store: its block's shared "
                "memory may be gone before it is read");
        if (!settings.latest) continue;
        for (Store& store : group.stores) {
            store.read_shared();
            owned.late.push_back([late = std::move(store)]() mutable { late.write_global(); });
        }
    }
}

// ----------------------------------------------------------------------------
// setmaxnreg: at the start each thread has an equal share of the 64 Ki registers, rounded down to a
// multiple of 8 and at most 248. A warp can take only what other warps have given back.

// Give registers back, or wait until other warps have given back enough. n: a thread's registers
// afterwards; `more`: setmaxnreg.inc.
inline void set_registers(unsigned n, bool more, const Site& site) {
    unsigned agreed = warp_operation(
        0xffffffffu, "setmaxnreg", n, [](unsigned, const Lanes<unsigned>& all) { return all[0]; },
        site);
    Unseen unseen;
    // The block's first setmaxnreg sets the table up.
    Block& b = *self().block;
    unsigned threads = unsigned(b.fibers.size()), &mine = b.registers[self().index / 32];
    unsigned start = std::min(65536 / threads / 8 * 8, 248u);
    if (!b.registers_set) {
        b.registers_set = true;
        b.free_registers = 0; // nothing is free until a warp gives registers back
        for (unsigned& r : b.registers)
            r = start;
    }

    // Check the number: the instruction's range, and the same in all lanes.
    if (n % 8 || n < 24 || n > 256 || agreed != n)
        error(site, "setmaxnreg %u: a multiple of 8 from 24 to 256, the same in a warp", n);

    // One lane counts for its warp.
    if (self().index % 32) return;
    if (more ? n < mine : n > mine)
        error(site, "setmaxnreg.%s to %u, but the warp has %u", more ? "inc" : "dec", n, mine);
    int taken = (int(n) - int(mine)) * 32;
    wait_while([&b, taken] { return taken > 0 && b.free_registers < taken; },
               "setmaxnreg, for registers", site);
    b.free_registers -= taken;
    mine = n;
}

} // namespace emulator

// ----------------------------------------------------------------------------
// hopper.cuh's wrappers, under their own names

#define SITE emulator::Site site = emulator::Site::current()

inline uint32_t smem_u32(const void* p, SITE) { return emulator::shared_address(p, site); }

inline void mbar_init(uint64_t* b, uint32_t arrivals, SITE) {
    *b = arrivals;
    emulator::Unseen unseen;
    emulator::Block& block = *emulator::self().block;
    if (uintptr_t(b) % 8 || arrivals == 0)
        emulator::error(site, "mbar_init(): %u arrivals at %p", arrivals, (void*)b);
    if (block.objects.count(b)) emulator::error(site, "mbar_init() of a live mbarrier");

    // Make the mbarrier, unknown to other threads until mbar_init_fence().
    auto bar = std::make_shared<emulator::Mbarrier>();
    bar->count = bar->pending = arrivals;
    bar->owner = emulator::thread_number();
    bar->site = site;
    block.objects[b] = bar;
    block.at_end = emulator::block_ends;
}
// Fences all mbarriers that the calling thread has made.
inline void mbar_init_fence() {
    emulator::Unseen unseen;
    for (auto& [address, object] : emulator::self().block->objects) {
        auto& bar = *static_cast<emulator::Mbarrier*>(object.get());
        if (bar.owner == emulator::thread_number()) bar.fenced = true;
    }
}
// Arrives, and expects `bytes` of loads before the phase may end.
inline void mbar_expect_tx(uint64_t* b, uint32_t bytes, SITE) {
    if (auto* bar = emulator::find_mbarrier(*emulator::self().block, b, "mbar_expect_tx", site))
        emulator::mbarrier_arrive(*bar, bytes, "mbar_expect_tx", site);
}
inline void mbar_arrive(uint64_t* b, SITE) {
    if (auto* bar = emulator::find_mbarrier(*emulator::self().block, b, "mbar_arrive", site))
        emulator::mbarrier_arrive(*bar, 0, "mbar_arrive", site);
}
// Waits for the phase of this parity to end. Waiting is also what makes loads in flight land.
inline void mbar_wait(uint64_t* b, uint32_t parity, SITE) {
    auto* bar = emulator::find_mbarrier(*emulator::self().block, b, "mbar_wait", site);
    if (!bar) return;
    emulator::wait_while(
        [bar, parity] {
            if ((bar->phase & 1) != parity) return false;
            bar->land();
            return (bar->phase & 1) == parity;
        },
        "mbar_wait", site);
    EMULATOR_TSAN(__tsan_acquire(&bar->order[parity]);)
}
// Shows the asynchronous proxy all of shared memory as it is now.
inline void fence_async_smem() {
    emulator::Unseen unseen;
    emulator::Block& b = *emulator::self().block;
    emulator::copy_raw(emulator::async_view(b), b.arena, b.arena_used);
}
template <int N> void regs_inc(SITE) { emulator::set_registers(N, true, site); }
template <int N> void regs_dec(SITE) { emulator::set_registers(N, false, site); }
inline void bar_sync(int id, int n, SITE) {
    emulator::barrier_sync(emulator::named_barrier(id, n, site), unsigned(n), "bar_sync", site);
}
inline void bar_arrive(int id, int n, SITE) {
    emulator::Unseen unseen;
    emulator::barrier_arrive(emulator::named_barrier(id, n, site), unsigned(n), site);
}
// The hardware does not say which lane it elects, so each thread order elects another one.
inline bool elect_one(SITE) {
    using emulator::Order;
    unsigned lane = emulator::warp_operation(
        0xffffffffu, "elect_one", 0,
        [](unsigned, const emulator::Lanes<int>& all) {
            return emulator::settings.order == Order::FORWARD   ? 0
                   : emulator::settings.order == Order::REVERSE ? 31
                                                                : unsigned(all.site.line()) % 32;
        },
        site);
    return emulator::lane_here() == lane;
}

inline void tma_prefetch(const CUtensorMap*) {}
inline void tma_load_4d(void* s, const CUtensorMap* m, uint64_t* bar, int c0, int c1, int c2,
                        int c3, SITE) {
    emulator::load_tile(s, m, bar, 4, {c0, c1, c2, c3}, "tma_load_4d", site);
}
inline void tma_store_4d(const CUtensorMap* m, const void* s, int c0, int c1, int c2, int c3,
                         SITE) {
    emulator::store_tile(m, s, 4, {c0, c1, c2, c3}, "tma_store_4d", site);
}
inline void bulk_load_1d(void* s, const void* g, uint32_t bytes, uint64_t* bar, SITE) {
    emulator::check_bulk(s, g, bytes, "bulk_load_1d", site);
    emulator::Load load = {emulator::self().block,
                           static_cast<unsigned char*>(s),
                           emulator::shared_address(s, site),
                           bytes,
                           false,
                           {},
                           {},
                           static_cast<const unsigned char*>(g)};
    emulator::start_load(load, bar, "bulk_load_1d", site);
}
inline void bulk_store(void* g, const void* s, uint32_t bytes, bool add, const char* what,
                       const emulator::Site& site) {
    emulator::check_bulk(s, g, bytes, what, site);
    emulator::Store store = {false,
                             add,
                             false,
                             {},
                             {},
                             static_cast<unsigned char*>(g),
                             static_cast<const unsigned char*>(s),
                             emulator::shared_address(s, site),
                             bytes,
                             site,
                             {}};
    emulator::start_store(store, what);
}
inline void bulk_store_1d(void* g, const void* s, uint32_t bytes, SITE) {
    bulk_store(g, s, bytes, false, "bulk_store_1d", site);
}
inline void bulk_reduce_add_f32(float* g, const void* s, uint32_t bytes, SITE) {
    bulk_store(g, s, bytes, true, "bulk_reduce_add_f32", site);
}
// The stores issued so far become one group, whose reading and writing can be waited for.
inline void bulk_commit() {
    emulator::Unseen unseen;
    emulator::Stores& s = emulator::my_stores();
    s.groups.push_back({std::move(s.open)});
    s.open.clear();
}
// Waits until all groups but the last N have read shared memory, which may then be written again.
template <int N> void bulk_wait_read() {
    emulator::Stores& s = emulator::my_stores();
    for (size_t i = 0; i + N < s.groups.size(); i++) {
        s.groups[i].read = true;
        if (emulator::settings.latest)
            for (emulator::Store& store : s.groups[i].stores) store.read_shared();
    }
}
// Waits until all groups but the last N have written global memory.
template <int N> void bulk_wait() {
    emulator::Stores& s = emulator::my_stores();
    for (; s.groups.size() > size_t(N); s.groups.pop_front())
        if (emulator::settings.latest)
            for (emulator::Store& store : s.groups.front().stores) store.write_global();
}

inline void wg_fence() { emulator::my_products().fenced = true; }
inline void wg_commit() {
    emulator::Products& mine = emulator::my_products();
    mine.groups.push_back(std::move(mine.open)); // an empty group counts too, as on the GPU
    mine.open.clear();
}
template <int N> void wg_wait(SITE) { emulator::wait_products(N, site); }
inline void keep(float&) {}
inline void never(bool impossible, SITE) {
    if (impossible) emulator::error(site, "never(): it happened");
}
template <typename T> float number_of(uint16_t bits) { return to_float(T{bits}); }

template <typename T, int N, int tA, int tB>
void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate, SITE) {
    emulator::issue_product(
        {d, N, accumulate != 0, false, a, b, tA != 0, tB != 0, nullptr, {}, number_of<T>, site},
        site);
}
template <typename T, int N, int tB>
void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate, SITE) {
    emulator::issue_product(
        {d, N, accumulate != 0, true, 0, b, false, tB != 0, a, {}, number_of<T>, site}, site);
}

// wait_for_turn() spins on a word in global memory that says whose turn it is. After turn_polls
// looks a thread gives up for everybody who waits, as a thread on a GPU does. With 0 it never gives
// up, and an endless wait is reported as a deadlock.
namespace emulator {
inline thread_local long turn_polls = 0;
}
inline void wait_for_turn(int* turn, int mine, SITE) {
    long polls = 0;
    auto waits = [=, &polls] {
        if (emulator::turn_polls && ++polls == emulator::turn_polls)
            __atomic_store_n(turn, INT_MIN, __ATOMIC_RELAXED);
        int now = __atomic_load_n(turn, __ATOMIC_RELAXED);
        return now != mine && now >= 0;
    };
    emulator::wait_while(waits, "wait_for_turn", site);
    (void)__atomic_load_n(turn, __ATOMIC_ACQUIRE);
}
inline void check_turn(const int* turn, SITE) {
    if (*turn < 0) emulator::error(site, "check_turn(): turns were lost");
}
// Let a later block have its turn.
inline void pass_turn(int* turn, int by) { __atomic_fetch_add(turn, by, __ATOMIC_RELEASE); }
#undef SITE
