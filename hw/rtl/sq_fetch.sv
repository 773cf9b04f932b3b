// Reads submission queue entries from the host, many at a time, and passes them on in the order of asking.
//
//     doorbells ── pick_* ──► request ── hrd_* ──► host
//                    ▲ room      │ burst            │ hrr_* (tags in any mix)
//                    │           ▼                  ▼
//                    └───── table of bursts ◄── staging: 64 entries of 4 beats, 2 BRAM36
//                                │                  │
//                 took_* ◄───────┴──── in order ────┴──► f_* ──► decode
//
// Staging is a ring: a burst's entries lie one after another from the place that is its tag, so nothing has to be looked up when
// beats come. A burst leaves when its last beat has come. The slot is taken as an entry leaves. A burst of which any beat has
// `hrr_error` is dropped whole, because whose commands those were (their CIDs) is not known: `bad_*` gives the places back and
// stops the queue, fault code 3. So what leaves by `f_*` is always good.
// Invariants: entries leave in the order of `pick_*`; a place is not asked for again before it was left; the SQ head told by
// `took_*` covers only entries that were read. One beat a cycle in and out; 3 cycles from the last beat to the first out.
`default_nettype none

module sq_fetch
    import millrace_pkg::*;
#(
    parameter int AHEAD = 0  // entries read or being read beyond the free slots, 0 to 64
) (
    input  wire logic               clk,
    input  wire logic               rst,

    // Registers 1000h + 4q + word: word 0, the base (bits 47:12).
    input  wire logic               qc_wr_en,
    input  wire logic [QUEUE_W+1:0] qc_wr_addr,
    input  wire logic [63:0]        qc_wr_data,

    // From and to doorbells.
    output      logic [2:0]         room,
    input  wire logic               pick_valid,
    output      logic               pick_ready,
    input  wire logic [QUEUE_W-1:0] pick_queue,
    input  wire logic [5:0]         pick_index,
    input  wire logic [2:0]         pick_count,
    input  wire logic               pick_wrap,
    output      logic               bad_valid,
    input  wire logic               bad_ready,
    output      logic [QUEUE_W-1:0] bad_queue,
    output      logic [2:0]         bad_count,

    // Host reads: tags 00h to 3Fh. Answers with other tags are others'.
    output      logic               hrd_valid,
    input  wire logic               hrd_ready,
    output      logic [63:0]        hrd_addr,
    output      logic [4:0]         hrd_beats,
    output      logic [7:0]         hrd_tag,
    input  wire logic               hrr_valid,
    input  wire logic [7:0]         hrr_tag,
    input  wire logic [127:0]       hrr_data,
    input  wire logic               hrr_last,
    input  wire logic               hrr_error,

    // A free slot (slots.sv); taken with an entry's first beat.
    input  wire logic               slot_valid,
    input  wire logic [SLOT_W-1:0]  slot,
    output      logic               slot_take,
    input  wire logic [SLOT_W:0]    slots_free,

    // To decode: four beats an entry.
    output      logic               f_valid,
    input  wire logic               f_ready,
    output      logic [1:0]         f_beat,
    output      logic [SLOT_W-1:0]  f_slot,
    output      logic [QUEUE_W-1:0] f_queue,
    output      logic [127:0]       f_data,

    // To completion (and the counter of commands taken): a queue's SQ head after an entry. A pulse.
    output      logic               took_valid,
    output      logic [QUEUE_W-1:0] took_queue,
    output      logic [5:0]         took_head,
    output      logic [SLOT_W:0]    staged      // entries read or being read, not yet in a slot
);
endmodule
`default_nettype wire
