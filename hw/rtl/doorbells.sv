// Tails, heads and sizes of a core's queues, and who is served next.
//
//     front ── db_* ──► check ──► tails, CQ heads ──┐
//     regs  ── qc_*, fc_* ──► sizes, weights ───────┤
//                                     arbiter ◄─────┘ ◄── posted_* (completion: CQ tails)
//                                        │            ◄── bad_*    (sq_fetch: a read failed)
//                                        └── pick_* ──► sq_fetch
//
// A doorbell is checked the cycle after it comes; it is never refused. The arbiter goes round the local functions; a function has
// its weight of commands a turn, its queues after one another. A pick is up to four entries of one queue, not across the ring's
// end, and takes 4 cycles. Invariants: a pick's places in the completion queue are reserved before it is offered (so a CQ is never
// overrun); a queue disabled or stopped is not picked; `qc_wr_ready` is given only between picks, so what a register says of a
// queue is never about to change by a pick under way.
`default_nettype none

module doorbells
    import millrace_pkg::*;
(
    input  wire logic               clk,
    input  wire logic               rst,

    // Doorbells (front).
    input  wire logic               db_valid,
    input  wire logic [QUEUE_W-1:0] db_queue,
    input  wire logic               db_cq,
    input  wire logic [15:0]        db_value,
    output      logic               fault_valid,  // a pulse
    output      logic [QUEUE_W-1:0] fault_queue,
    output      logic [15:0]        fault_code,

    // Registers 1000h + 4q + word. A write is offered by `qc_wr_valid` and carried out, in every module that has a `qc_wr_en`, in
    // the cycle of `qc_wr_en`: offered, and all of `qc_wr_ready` (doorbells, completion, interrupts) high.
    input  wire logic               qc_wr_valid,
    output      logic               qc_wr_ready,
    input  wire logic               qc_wr_en,
    input  wire logic [QUEUE_W+1:0] qc_wr_addr,
    input  wire logic [63:0]        qc_wr_data,
    // Word 3, the only one that is read: `qc_rd_valid` held until `qc_rd_ready`, data in that cycle.
    input  wire logic               qc_rd_valid,
    output      logic               qc_rd_ready,
    input  wire logic [QUEUE_W-1:0] qc_rd_queue,
    output      logic [63:0]        qc_rd_data,
    // Registers 2000h + 8f + word: word 1, the weight. Carried out in the cycle of `fc_wr_en`.
    input  wire logic               fc_wr_en,
    input  wire logic [LF_W+2:0]    fc_wr_addr,
    input  wire logic [63:0]        fc_wr_data,

    // To sq_fetch: read `count` (1 to 4) entries of a queue from `index`; `wrap`: the last of them is the ring's last.
    input  wire logic [2:0]         room,         // entries that sq_fetch has room for, at most 4
    output      logic               pick_valid,
    input  wire logic               pick_ready,
    output      logic [QUEUE_W-1:0] pick_queue,
    output      logic [5:0]         pick_index,
    output      logic [2:0]         pick_count,
    output      logic               pick_wrap,
    // From sq_fetch: so many entries could not be read. Their places are given back, the queue stops.
    input  wire logic               bad_valid,
    output      logic               bad_ready,
    input  wire logic [QUEUE_W-1:0] bad_queue,
    input  wire logic [2:0]         bad_count,

    // From completion: an entry was posted; where the next one goes. A pulse.
    input  wire logic               posted_valid,
    input  wire logic [QUEUE_W-1:0] posted_queue,
    input  wire logic [5:0]         posted_tail,
    input  wire logic               posted_phase
);
endmodule
`default_nettype wire
