// Tells disks of new entries in their submission queues, and of places that are free again in their completion queues.
//
//   submit: tail_moved, tail ────────► to tell: SQ ──┐
//   ssd_completions: cq_due, cq_head ► to tell: CQ ──┴─► in turn, CQ heads first (they are rare) ──► sdb_*
//
// One write tells of everything that has come until it is offered: while one waits, others gather.
// Invariants: what is told is never behind what was told; every entry is told of.
// Cycles: 1 from a tail's move to `sdb_*`; one doorbell a cycle.
`default_nettype none

module ssd_doorbells #(
    parameter int  SSDS = 1,
    localparam int N_W  = $clog2(64 / SSDS)
) (
    input  wire logic                     clk,
    input  wire logic                     rst,

    input  wire logic [SSDS-1:0]          ssd_write,    // the queue pair starts anew: nothing is to be told
    input  wire logic [SSDS-1:0]          tail_moved,
    input  wire logic [SSDS-1:0][N_W-1:0] tail,
    input  wire logic [SSDS-1:0]          cq_due,
    output      logic [SSDS-1:0]          cq_told,
    input  wire logic [SSDS-1:0][N_W-1:0] cq_head,

    output      logic                     sdb_valid,
    input  wire logic                     sdb_ready,
    output      logic [3:0]               sdb_ssd,
    output      logic                     sdb_cq,
    output      logic [15:0]              sdb_value,

    output      logic                     busy
);
    logic [SSDS-1:0] new_tail;          // entries that the disk does not know of
    logic [SSDS-1:0] last;              // the disk that was told last, a bit
    wire             is_cq    = cq_due != '0;
    wire  [SSDS-1:0] wants    = is_cq ? cq_due : new_tail;
    wire  [SSDS-1:0] above    = wants & ~(last | (last - 1'b1));
    wire  [SSDS-1:0] among    = above != '0 ? above : wants;
    wire  [SSDS-1:0] chosen   = among & (~among + 1'b1);
    wire             load     = (!sdb_valid || sdb_ready) && wants != '0;

    logic [N_W-1:0] value;
    logic [3:0]     number;
    always_comb begin
        {value, number} = '0;
        for (int d = 0; d < SSDS; d++) begin
            if (chosen[d]) begin
                value  |= is_cq ? cq_head[d] : tail[d];
                number |= 4'(d);
            end
        end
    end
    assign cq_told = load && is_cq ? chosen : '0;
    assign busy    = sdb_valid || wants != '0;

    always_ff @(posedge clk) begin
        if (rst) sdb_valid <= 1'b0;
        else if (load) sdb_valid <= 1'b1;
        else if (sdb_ready) sdb_valid <= 1'b0;
        for (int d = 0; d < SSDS; d++) begin
            if (tail_moved[d]) new_tail[d] <= 1'b1;
            else if (load && !is_cq && chosen[d]) new_tail[d] <= 1'b0;
            if (rst || ssd_write[d]) new_tail[d] <= 1'b0;
        end
        if (load) last <= chosen;
        if (rst) last <= SSDS'(1);
    end
    always_ff @(posedge clk) begin
        if (load) begin
            sdb_ssd   <= number;
            sdb_cq    <= is_cq;
            sdb_value <= 16'(value);
        end
    end
endmodule

`default_nettype wire
