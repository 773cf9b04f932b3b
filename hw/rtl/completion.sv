// Posts completion queue entries.
//
//     slots ── cpl_* ──► read queue's CQ ──► entry ── cqe_* ──► host_writes ──► hwr_*
//     sq_fetch ── took_* ──► SQ heads           │
//                                               └─ taken ──► posted_* (doorbells), free_* (slots), irq_* (interrupts)
//
// Room was reserved before the command was fetched, so an entry always has a place. Invariants: a queue's entries lie one after
// another, the phase turns with each lap; the slot is freed, the CQ tail told and the interrupt considered only once the
// entry is in the ordered channel to the host. 3 cycles an entry.
`default_nettype none

module completion
    import millrace_pkg::*;
(
    input  wire logic               clk,
    input  wire logic               rst,

    // Registers 1000h + 4q + word: word 0 (enabling resets tail, phase, head), 1 (CQ size), 2 (CQ base, bits 47:12).
    input  wire logic               qc_wr_valid,
    output      logic               qc_wr_ready,
    input  wire logic               qc_wr_en,
    input  wire logic [QUEUE_W+1:0] qc_wr_addr,
    input  wire logic [63:0]        qc_wr_data,

    // From sq_fetch: SQ heads.
    input  wire logic               took_valid,
    input  wire logic [QUEUE_W-1:0] took_queue,
    input  wire logic [5:0]         took_head,

    // From slots: a command has ended.
    input  wire logic               cpl_valid,
    output      logic               cpl_ready,
    input  wire logic [SLOT_W-1:0]  cpl_slot,
    input  wire owner_t             cpl_owner,
    input  wire status_t            cpl_status,

    // To host_writes: an entry of 16 bytes.
    output      logic               cqe_valid,
    input  wire logic               cqe_ready,
    output      logic [63:0]        cqe_addr,
    output      logic [127:0]       cqe_data,

    // What follows from it.
    output      logic               posted_valid,  // a pulse; also counted
    output      logic [QUEUE_W-1:0] posted_queue,
    output      logic [5:0]         posted_tail,
    output      logic               posted_phase,
    output      logic               free_valid,    // a pulse
    output      logic [SLOT_W-1:0]  free_slot,
    output      logic               irq_valid,     // to interrupts
    input  wire logic               irq_ready,
    output      logic [QUEUE_W-1:0] irq_queue
);
endmodule
`default_nettype wire
