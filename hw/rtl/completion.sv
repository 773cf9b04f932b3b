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
    output      logic [QUEUE_W-1:0] irq_queue,

    output      logic               busy
);
    // ---- What is kept of a queue
    (* ram_style = "distributed" *) logic [35:0] base[64];
    (* ram_style = "distributed" *) logic [5:0]  last[64];     // index of the ring's last entry
    (* ram_style = "distributed" *) logic [6:0]  tails[64];    // phase, tail
    (* ram_style = "distributed" *) logic [5:0]  sq_heads[64];
    wire [QUEUE_W-1:0] wr_queue  = qc_wr_addr[QUEUE_W+1:2];
    wire               wr_enable = qc_wr_en && qc_wr_addr[1:0] == 2'd0 && qc_wr_data[0];
    always_ff @(posedge clk) begin
        if (qc_wr_en && qc_wr_addr[1:0] == 2'd2) base[wr_queue] <= qc_wr_data[47:12];
        if (qc_wr_en && qc_wr_addr[1:0] == 2'd1) last[wr_queue] <= qc_wr_data[13:8] - 6'd1;
        if (wr_enable || took_valid) sq_heads[wr_enable ? wr_queue : took_queue] <= wr_enable ? 6'd0 : took_head;
    end
    wire unused = &{1'b0, qc_wr_data[63:48], qc_wr_data[7:1]};

    // ---- An entry at a time
    typedef enum logic [1:0] {WAIT, READ, POST} step_t;
    step_t              step;
    logic [SLOT_W-1:0]  slot;
    owner_t             owner;
    status_t            status;
    wire [QUEUE_W-1:0]  queue  = owner.queue;
    wire                posted = cqe_valid && cqe_ready;
    assign cpl_ready   = step == WAIT && !qc_wr_valid;
    assign qc_wr_ready = step == WAIT && !took_valid;
    always_ff @(posedge clk) begin
        unique case (step)
            WAIT: if (cpl_valid && cpl_ready) step <= READ;
            READ: if (!irq_valid || irq_ready) step <= POST;
            default: if (cqe_ready) step <= WAIT;
        endcase
        if (step == WAIT) {slot, owner, status} <= {cpl_slot, cpl_owner, cpl_status};
        if (rst) step <= WAIT;
    end

    logic [35:0] entry_base;
    logic [5:0]  tail, sq_head, queue_last;
    logic        phase;
    always_ff @(posedge clk) begin
        if (step == READ) begin
            entry_base    <= base[queue];
            {phase, tail} <= tails[queue];
            sq_head       <= sq_heads[queue];
            queue_last    <= last[queue];
        end
    end

    wire         turns = tail == queue_last; // the lap is full
    wire  [5:0]  next_tail  = turns ? 6'd0 : tail + 6'd1;
    wire         next_phase = phase ^ turns;
    wire  [15:0] sqid = 16'(queue[QUEUE_W-LF_W-1:0]) + 16'd1;
    assign cqe_valid = step == POST;
    assign cqe_addr  = {16'd0, entry_base, 2'd0, tail, 4'd0};
    assign cqe_data  = {status, phase, owner.cid, sqid, 10'd0, sq_head, 64'd0};

    always_ff @(posedge clk) begin
        if (wr_enable || posted) tails[wr_enable ? wr_queue : queue] <= wr_enable ? 7'h40 : {next_phase, next_tail};
    end

    // ---- What follows
    assign free_valid = posted_valid;
    always_ff @(posedge clk) begin
        posted_valid <= posted && !rst;
        posted_queue <= queue;
        posted_tail  <= next_tail;
        posted_phase <= next_phase;
        free_slot    <= slot;
    end
    always_ff @(posedge clk) begin
        if (posted) begin
            irq_valid <= 1'b1;
            irq_queue <= queue;
        end else if (irq_ready) begin
            irq_valid <= 1'b0;
        end
        if (rst) irq_valid <= 1'b0;
    end
    assign busy = step != WAIT || cpl_valid || irq_valid || posted_valid;

`ifndef SYNTHESIS
    always_ff @(posedge clk) begin
        if (!rst) begin
            assert (!(posted && irq_valid && !irq_ready)) else $fatal(1, "completion: an entry posted before the last one's interrupt was considered");
            assert (!(wr_enable && (posted || took_valid))) else $fatal(1, "completion: queue %0d is enabled while a memory is written", wr_queue);
            assert (!posted || tail <= queue_last) else $fatal(1, "completion: queue %0d: entry %0d of %0d", queue, tail, queue_last);
        end
    end
`endif
endmodule
`default_nettype wire
