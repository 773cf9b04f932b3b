// queue_arbiter.sv: what it finds is active, a function with an active queue is known to have one, and none is passed over: when the turn
// changes while a function `it` (any one) has had an active queue for two cycles, the turn goes to `it` or to one that lies before it on the
// way round. So it waits for at most one turn of every other function; a turn ends, since each choice in it spends credit or finds the queue empty.
//
// What is assumed of doorbells.sv: after a reset it sweeps all rows, and chooses nothing meanwhile; it chooses what is found, not more often
// than every 4 cycles; 3 cycles after, it may spend credit that is there and mark the same queue again. Proved for 4 functions of 4 queues.
//
// with: LF_W=2 QUEUE_W=4
// steps: 4
`default_nettype none

module arbiter_fair
    import millrace_pkg::*;
(
    input  wire logic               clk,
    input  wire logic               rst,
    input  wire logic               fc_wr_en,
    input  wire logic [LF_W+2:0]    fc_wr_addr,
    input  wire logic [63:0]        fc_wr_data,
    input  wire logic               ring_valid,
    input  wire logic [QUEUE_W-1:0] ring_queue,
    input  wire logic               choose,
    input  wire logic               spend,
    input  wire logic [2:0]         spend_count,
    input  wire logic               again,
    output      logic               reached
);
    localparam int QP_W = QUEUE_W - LF_W;
    logic               found, any;
    logic [QUEUE_W-1:0] found_queue, chosen;
    logic [3:0]         credit;
    logic [LF_W:0]      sweep;
    wire                sweeping = !sweep[LF_W];
    always_ff @(posedge clk) begin
        if (rst) sweep <= '0;
        else if (sweeping) sweep <= sweep + 1'b1;
    end
    queue_arbiter dut (
        .clk, .rst, .sweeping, .sweep(sweep[LF_W-1:0]), .fc_wr_en, .fc_wr_addr, .fc_wr_data, .ring_valid, .ring_queue, .found, .found_queue, .any, .choose,
        .credit, .spend, .spend_count, .again, .again_queue(chosen)
    );

    logic [1:0] wait_; // cycles until the next choice
    always_ff @(posedge clk) begin
        if (rst) wait_ <= '0;
        else if (choose) wait_ <= 2'd3;
        else if (wait_ != '0) wait_ <= wait_ - 2'd1;
        if (choose) chosen <= found_queue;
    end

    logic [LF_W-1:0] it;
    logic            waiting;  // `it` was active in the cycle before, too
    wire             swept     = !sweeping || it < sweep[LF_W-1:0];
    wire             has_it    = swept && dut.rung[it] != dut.chosen[it];
    wire  [LF_W-1:0] to        = found_queue[QUEUE_W-1:QP_W];
    // On the way round from the turn: how far to `it`, how far to the one that gets the turn; the turn's own function is last.
    wire  [LF_W-1:0] far_it    = it - dut.turn - 1'b1;
    wire  [LF_W-1:0] far_to    = to - dut.turn - 1'b1;
    always_ff @(posedge clk) begin
        it      <= it;
        waiting <= !rst && has_it;
    end

    always_ff @(posedge clk) begin
        assume (!choose || (found && wait_ == '0 && !rst && !sweeping));
        assume (!(spend || again) || wait_ == 2'd1);
        assume (!spend || 4'(spend_count) <= credit);
        if (!rst) begin
            if (found) assert (dut.rung[to][found_queue[QP_W-1:0]] != dut.chosen[to][found_queue[QP_W-1:0]]);
            assert (!has_it || dut.has[it]);
            if (choose && !dut.stay && waiting && has_it) assert (far_to <= far_it);
            if (choose && dut.stay) assert (credit != '0);
        end
    end
    assign reached = !rst && choose && !dut.stay && waiting && to != it;
endmodule
`default_nettype wire
