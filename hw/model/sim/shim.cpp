// One model of the engine behind a C interface: a call is a clock cycle. Compiled once for each configuration, with MODEL as Verilator's
// class and SSDS as the model has it.
//
// A cycle: inputs are applied, outputs are what they are before the rising edge (they and the inputs decide what was transferred), then
// the edge. `busy` and `fault` are those after it.
#include <cstdint>
#include <cstring>
#include <memory>
#include "verilated.h"
#define STRING_(x) #x
#define STRING(x) STRING_(x)
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(name) JOIN(JOIN(MODEL, _), name)
#include STRING(MODEL.h)

// As in src/sim/ports.rs.
struct In {
    uint64_t reg_wdata;
    uint32_t bar_data, reg_addr;
    uint32_t hrr_data[4];
    uint32_t sdr_addr[16], sdw_addr[16];
    uint32_t sdw_data[16][4];
    uint16_t bar_offset, hrr_tag, sdb_ready, sdr_valid, sdd_ready, sdw_valid;
    uint8_t sdr_beats[16], sdr_tag[16];
    uint8_t rst, bar_valid, bar_function, reg_valid, reg_write, hrd_ready, hrr_valid, hrr_last, hrr_error, hwr_ready;
};

struct Out {
    uint64_t reg_rdata, hrd_addr, hwr_addr;
    uint32_t hwr_data[4];
    uint32_t sdd_data[16][4];
    uint16_t hrd_tag, sdb_valid, sdb_cq, sdr_ready, sdd_valid, sdd_last, sdw_ready, fault;
    uint16_t sdb_value[16];
    uint8_t sdb_core[16], sdd_tag[16];
    uint8_t reg_ready, reg_rvalid, hrd_valid, hrd_beats, hwr_valid, hwr_kind, hwr_bytes, hwr_function, hwr_vector, busy;
};

// Fields of packed vectors, whatever Verilator makes of their width.
template <class T> static uint64_t get(const T& from, unsigned low, unsigned bits) {
    return (uint64_t(from) >> low) & (~uint64_t(0) >> (64 - bits));
}
template <std::size_t N> static uint64_t get(const VlWide<N>& from, unsigned low, unsigned bits) {
    uint64_t word = from[low / 32];
    if (low / 32 + 1 < N) word |= uint64_t(from[low / 32 + 1]) << 32;
    return (word >> (low % 32)) & (~uint64_t(0) >> (64 - bits)); // fields are of 32 bits at most
}
template <class T> static void put(T& to, unsigned low, unsigned bits, uint64_t value) {
    uint64_t mask = (~uint64_t(0) >> (64 - bits)) << low;
    to = T((uint64_t(to) & ~mask) | ((value << low) & mask));
}
template <std::size_t N> static void put(VlWide<N>& to, unsigned low, unsigned bits, uint64_t value) {
    for (unsigned bit = 0; bit < bits; bit++) {
        uint32_t one = uint32_t(1) << ((low + bit) % 32);
        uint32_t& word = to[(low + bit) / 32];
        word = (value >> bit) & 1 ? word | one : word & ~one;
    }
}

struct Sim {
    VerilatedContext context;
    MODEL top{&context, "engine"};
};

extern "C" void* NAME(make)() {
    return new Sim;
}

extern "C" void NAME(drop)(void* sim) {
    delete static_cast<Sim*>(sim);
}

extern "C" void NAME(cycle)(void* sim, const In* in, Out* out) {
    auto& top = static_cast<Sim*>(sim)->top;
    top.rst = in->rst;
    top.bar_valid = in->bar_valid;
    top.bar_function = in->bar_function;
    top.bar_offset = in->bar_offset;
    top.bar_data = in->bar_data;
    top.reg_valid = in->reg_valid;
    top.reg_write = in->reg_write;
    top.reg_addr = in->reg_addr;
    top.reg_wdata = in->reg_wdata;
    top.hrd_ready = in->hrd_ready;
    top.hrr_valid = in->hrr_valid;
    top.hrr_tag = in->hrr_tag;
    for (int word = 0; word < 4; word++) top.hrr_data[word] = in->hrr_data[word];
    top.hrr_last = in->hrr_last;
    top.hrr_error = in->hrr_error;
    top.hwr_ready = in->hwr_ready;
    put(top.sdb_ready, 0, SSDS, in->sdb_ready);
    put(top.sdr_valid, 0, SSDS, in->sdr_valid);
    put(top.sdd_ready, 0, SSDS, in->sdd_ready);
    put(top.sdw_valid, 0, SSDS, in->sdw_valid);
    for (int disk = 0; disk < SSDS; disk++) {
        if (in->sdr_valid >> disk & 1) {
            put(top.sdr_addr, 18 * disk, 18, in->sdr_addr[disk]);
            put(top.sdr_beats, 5 * disk, 5, in->sdr_beats[disk]);
            put(top.sdr_tag, 8 * disk, 8, in->sdr_tag[disk]);
        }
        if (in->sdw_valid >> disk & 1) {
            put(top.sdw_addr, 18 * disk, 18, in->sdw_addr[disk]);
            for (int word = 0; word < 4; word++) put(top.sdw_data, 128 * disk + 32 * word, 32, in->sdw_data[disk][word]);
        }
    }
    top.clk = 0;
    top.eval();
    out->reg_ready = top.reg_ready;
    out->reg_rvalid = top.reg_rvalid;
    out->reg_rdata = top.reg_rdata;
    out->hrd_valid = top.hrd_valid;
    out->hrd_addr = top.hrd_addr;
    out->hrd_beats = top.hrd_beats;
    out->hrd_tag = top.hrd_tag;
    out->hwr_valid = top.hwr_valid;
    out->hwr_kind = top.hwr_kind;
    out->hwr_addr = top.hwr_addr;
    for (int word = 0; word < 4; word++) out->hwr_data[word] = top.hwr_data[word];
    out->hwr_bytes = top.hwr_bytes;
    out->hwr_function = top.hwr_function;
    out->hwr_vector = top.hwr_vector;
    out->sdb_valid = uint16_t(get(top.sdb_valid, 0, SSDS));
    out->sdb_cq = uint16_t(get(top.sdb_cq, 0, SSDS));
    out->sdr_ready = uint16_t(get(top.sdr_ready, 0, SSDS));
    out->sdd_valid = uint16_t(get(top.sdd_valid, 0, SSDS));
    out->sdd_last = uint16_t(get(top.sdd_last, 0, SSDS));
    out->sdw_ready = uint16_t(get(top.sdw_ready, 0, SSDS));
    for (int disk = 0; disk < SSDS; disk++) {
        if (out->sdb_valid >> disk & 1) {
            out->sdb_core[disk] = uint8_t(get(top.sdb_core, 4 * disk, 4));
            out->sdb_value[disk] = uint16_t(get(top.sdb_value, 16 * disk, 16));
        }
        if (out->sdd_valid >> disk & 1) {
            out->sdd_tag[disk] = uint8_t(get(top.sdd_tag, 8 * disk, 8));
            for (int word = 0; word < 4; word++) out->sdd_data[disk][word] = uint32_t(get(top.sdd_data, 128 * disk + 32 * word, 32));
        }
    }
    top.clk = 1;
    top.eval();
    out->busy = top.busy;
    out->fault = uint16_t(top.fault);
}
