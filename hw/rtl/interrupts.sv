// Decides, once for each entry posted, whether and when its interrupt goes out.
//
//     completion ── irq_* ──┐
//     scan of all queues ───┴─► queue's state ──► enabled? coalesced? masked? ──► msi_* ──► host_writes ──► hwr_* (kind 1)
//
// State per queue: entries since its last interrupt, when the first of them came, and whether one waits for its mask. Entries
// are counted while coalescing is on; the interrupt goes when there are more than the threshold (0's based) or the time is over. The
// scan finds times that are over and masks that were taken away. Vector 0 is never coalesced (the admin queue's, which is
// software's). Invariants: every entry of an enabled queue is followed by an interrupt, at the latest when unmasked and the time is over;
// none overtakes its entry (completion hands over only what is in the ordered channel). 3 cycles a decision; a round of the scan takes 256
// cycles, 1,024 under full load.
`default_nettype none

module interrupts
    import millrace_pkg::*;
(
    input  wire logic               clk,
    input  wire logic               rst,
    input  wire logic [31:0]        now,           // register 0003h: units of 64 cycles

    // Registers 1000h + 4q + word: word 0 (enabling resets), 1 (bits 16, 31:24).
    input  wire logic               qc_wr_valid,
    output      logic               qc_wr_ready,
    input  wire logic               qc_wr_en,
    input  wire logic [QUEUE_W+1:0] qc_wr_addr,
    input  wire logic [63:0]        qc_wr_data,
    // Registers 2000h + 8f + word: word 0.
    input  wire logic               fc_wr_en,
    input  wire logic [LF_W+2:0]    fc_wr_addr,
    input  wire logic [63:0]        fc_wr_data,

    // From completion: an entry was posted.
    input  wire logic               irq_valid,
    output      logic               irq_ready,
    input  wire logic [QUEUE_W-1:0] irq_queue,

    // To host_writes: an interrupt. Counted when taken.
    output      logic               msi_valid,
    input  wire logic               msi_ready,
    output      logic [LF_W-1:0]    msi_function,
    output      logic [7:0]         msi_vector
);
endmodule
`default_nettype wire
