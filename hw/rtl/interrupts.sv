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
    input  wire logic [7:0]         tick,         // register 0003h, bits 15:8: units of 16,384 cycles

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
    output      logic [7:0]         msi_vector,

    output      logic               busy          // something is to be sent, now or in time
);
    localparam int QP_W = QUEUE_W - LF_W;

    // ---- After reset no queue has interrupts, no function coalesces or masks.
    logic [6:0] sweep;
    wire        sweeping = !sweep[6];
    always_ff @(posedge clk) begin
        if (rst) sweep <= '0;
        else if (sweeping) sweep <= sweep + 7'd1;
    end

    // ---- Registers
    typedef struct packed {
        logic       coalesces;
        logic [7:0] time_;
        logic [7:0] threshold;
    } coalescing_t;
    (* ram_style = "distributed" *) logic [8:0]  vectors[64];          // enabled, vector
    (* ram_style = "distributed" *) coalescing_t coalescing[1<<LF_W];
    (* ram_style = "distributed" *) logic [31:0] masks[1<<LF_W];
    wire [QUEUE_W-1:0] wr_queue    = qc_wr_addr[QUEUE_W+1:2];
    wire               wr_enable   = qc_wr_en && qc_wr_addr[1:0] == 2'd0 && qc_wr_data[0];
    wire               wr_vector   = qc_wr_en && qc_wr_addr[1:0] == 2'd1;
    wire               wr_function = fc_wr_en && fc_wr_addr[2:0] == 3'd0;
    wire [LF_W-1:0]    fc_at       = sweeping ? sweep[LF_W-1:0] : fc_wr_addr[LF_W+2:3];
    always_ff @(posedge clk) begin
        if (sweeping || wr_vector) vectors[sweeping ? sweep[5:0] : wr_queue] <= sweeping ? '0 : {qc_wr_data[16], qc_wr_data[31:24]};
        if (sweeping || wr_function) begin
            coalescing[fc_at] <= sweeping ? '0 : fc_wr_data[16:0];
            masks[fc_at]      <= sweeping ? '0 : fc_wr_data[63:32];
        end
    end
    wire unused = &{1'b0, qc_wr_data[63:32], qc_wr_data[23:17], qc_wr_data[15:1], fc_wr_data[31:17]};

    // ---- A queue at a time: one that has an entry, or the next of the scan, which has every fourth turn at least
    typedef enum logic [1:0] {CHOOSE, READ, DECIDE} step_t;
    step_t              step;
    logic [QUEUE_W-1:0] queue;
    logic               entry;     // an entry came, else it is the scan
    logic [QUEUE_W-1:0] scan;
    logic [1:0]         entries;   // since the last look of the scan
    wire                take  = irq_valid && entries != 2'd3;
    // A write of registers waits for entries, because completion waits for them before it can be ready for the write.
    wire                begin_ = step == CHOOSE && !sweeping && (!qc_wr_valid || irq_valid);
    assign irq_ready   = begin_ && take;
    assign qc_wr_ready = step == CHOOSE && !sweeping && !irq_valid;
    wire sends;
    wire decided = step == DECIDE && (!sends || !msi_valid || msi_ready);
    always_ff @(posedge clk) begin
        unique case (step)
            CHOOSE: begin
                entry <= take;
                queue <= take ? irq_queue : scan;
                if (begin_) begin
                    step    <= READ;
                    entries <= take ? entries + 2'd1 : 2'd0;
                    if (!take) scan <= scan + 1'b1;
                end
            end
            READ: step <= DECIDE;
            default: if (decided) step <= CHOOSE;
        endcase
        if (rst) begin
            step            <= CHOOSE;
            {scan, entries} <= '0;
        end
    end

    // ---- READ
    typedef struct packed {
        logic       waits;   // for its mask
        logic [7:0] count;   // entries since the last interrupt
        logic [7:0] since;   // the tick of the first of them
    } state_t;
    (* ram_style = "distributed" *) state_t states[64];
    wire [LF_W-1:0] function_ = queue[QUEUE_W-1:QP_W];
    wire [8:0]      of_queue  = vectors[queue];
    wire [31:0]     mask      = masks[function_];
    // Whether it is due is decided from the memories, so that DECIDE has not everything to do.
    wire state_t      was     = states[queue];
    wire coalescing_t rule    = coalescing[function_];
    wire [8:0]        so_many = {1'b0, was.count} + 9'(entry);
    wire              over    = 8'(tick - (was.count != '0 ? was.since : tick)) >= rule.time_;
    wire              at_once = !rule.coalesces || of_queue[7:0] == '0;
    logic [7:0]     counted, began;
    logic           enabled, masked, due;
    logic [7:0]     vector;
    always_ff @(posedge clk) begin
        if (step == READ) begin
            {counted, began}  <= {was.count, was.since};
            due               <= was.waits || (so_many != '0 && (at_once || over || so_many > {1'b0, rule.threshold}));
            {enabled, vector} <= of_queue;
            masked            <= of_queue[7:5] == '0 && mask[of_queue[4:0]];
        end
    end

    // ---- DECIDE
    wire       counts  = counted != '0;
    wire [8:0] count   = {1'b0, counted} + 9'(entry);
    wire [7:0] since   = counts ? began : tick;
    assign sends = enabled && due && !masked;
    state_t then_;
    always_comb begin
        then_ = '{waits: 1'b0, count: count[7:0], since: since};
        if (!enabled || sends) then_ = '0;
        else if (due) then_ = '{waits: 1'b1, count: '0, since: '0};
    end
    wire [QUEUE_W-1:0] state_at = wr_enable ? wr_queue : queue;
    always_ff @(posedge clk) begin
        if (wr_enable || decided) states[state_at] <= wr_enable ? '0 : then_;
    end
    always_ff @(posedge clk) begin
        if (decided && sends) begin
            msi_valid    <= 1'b1;
            msi_function <= function_;
            msi_vector   <= vector;
        end else if (msi_ready) begin
            msi_valid <= 1'b0;
        end
        if (rst) msi_valid <= 1'b0;
    end

    // ---- Busy until a round of the scan found nothing that is to be sent: what waits for its mask waits for a register.
    logic [6:0] quiet;
    always_ff @(posedge clk) begin
        if (qc_wr_en || fc_wr_en || irq_valid || (decided && (sends || then_.count != '0))) quiet <= '0;
        else if (decided && !entry && !quiet[6]) quiet <= quiet + 7'd1;
        if (rst) quiet <= '0;
    end
    assign busy = sweeping || !quiet[6] || irq_valid || msi_valid;

`ifndef SYNTHESIS
    always_ff @(posedge clk) begin
        if (!rst) begin
            assert (!wr_enable || step == CHOOSE) else $fatal(1, "interrupts: queue %0d is enabled while its state is written", wr_queue);
            // The threshold has 8 bits, so a count above it always fits.
            assert (!decided || !then_.waits || masked) else $fatal(1, "interrupts: queue %0d waits, though not masked", queue);
            assert (!decided || sends || count <= 9'd255) else $fatal(1, "interrupts: queue %0d lost count", queue);
        end
    end
`endif
endmodule
`default_nettype wire
