// Which queue is looked at next: round the local functions, and within a function round its queues.
//
//     ring_* (a doorbell) ──► active: a bit per queue ──┬─► of the function whose turn it is, credit left ──┐
//     again_* (more is left) ─►                         └─► of the next function that has any ──────────────┴─► found_*
//
// A turn gives a function credit for as many commands as its weight; it keeps the turn while it has credit and an active queue.
// A queue's bit is cleared when it is chosen and set again if more is left, so a doorbell that comes meanwhile is never lost:
// it sets the bit after the clearing. Invariant: a function that stays active is served within one turn of every other.
// `found` is two cycles behind a doorbell, and two more for each function before that has just run empty; a choice needs 4 cycles until the next (so that `spend` is known).
`default_nettype none

module queue_arbiter
    import millrace_pkg::*;
(
    input  wire logic               clk,
    input  wire logic               rst,
    input  wire logic               sweeping,     // after reset: weights become 4, a whole burst
    input  wire logic [LF_W-1:0]    sweep,

    // Registers 2000h + 8f + word: word 1.
    input  wire logic               fc_wr_en,
    input  wire logic [LF_W+2:0]    fc_wr_addr,
    input  wire logic [63:0]        fc_wr_data,

    input  wire logic               ring_valid,
    input  wire logic [QUEUE_W-1:0] ring_queue,

    output      logic               found,
    output      logic [QUEUE_W-1:0] found_queue,
    output      logic               any,          // some queue is active
    input  wire logic               choose,
    output      logic [3:0]         credit,       // of the function chosen, from the cycle after `choose`
    input  wire logic               spend,
    input  wire logic [2:0]         spend_count,
    input  wire logic               again,
    input  wire logic [QUEUE_W-1:0] again_queue
);
    localparam int FUNCTIONS = 1 << LF_W;
    localparam int QP        = 1 << (QUEUE_W - LF_W);
    localparam int QP_W      = QUEUE_W - LF_W;

    // ---- Weights, 1 to 8; 0 counts as 1
    (* ram_style = "distributed" *) logic [3:0] weights[FUNCTIONS];
    wire       weight_write = fc_wr_en && fc_wr_addr[2:0] == 3'd1;
    wire [3:0] weight = sweeping ? 4'd4 : fc_wr_data[3:0] == '0 ? 4'd1 : fc_wr_data[3] ? 4'd8 : fc_wr_data[3:0];
    always_ff @(posedge clk) begin
        if (sweeping || weight_write) weights[sweeping ? sweep : fc_wr_addr[LF_W+2:3]] <= weight;
    end
    wire unused = &{1'b0, fc_wr_data[63:4]};

    // ---- Active queues: those whose bits in two memories differ. Doorbells write the one, choosing and `again` the other, so each has one
    // writer. Choosing and `again` are never in one cycle, and are of the function whose turn it is, or becomes it.
    (* ram_style = "distributed" *) logic [QP-1:0] rung[FUNCTIONS];
    (* ram_style = "distributed" *) logic [QP-1:0] chosen[FUNCTIONS];
    logic [LF_W-1:0]  turn, next;
    wire [LF_W-1:0]   ring_row  = ring_queue[QUEUE_W-1:QP_W];
    wire [QP-1:0]     ring_col  = QP'(1) << ring_queue[QP_W-1:0];
    wire [QP-1:0]     mark_col  = QP'(1) << (again ? again_queue[QP_W-1:0] : found_queue[QP_W-1:0]);
    wire [QP-1:0]     turn_rung = rung[turn];
    wire [QP-1:0]     turn_done = chosen[turn];
    wire [QP-1:0]     next_rung = rung[next];
    wire [QP-1:0]     next_done = chosen[next];
    wire [QP-1:0]     of_turn   = turn_rung ^ turn_done;
    wire [QP-1:0]     of_next   = next_rung ^ next_done;
    wire              stay      = credit != '0 && of_turn != '0;
    wire              at_turn   = again || stay;   // where the mark is
    // A doorbell makes its queue active whatever else is said of it in the same cycle.
    wire              marks     = (again && !(ring_valid && ring_queue == again_queue)) || (choose && !(ring_valid && ring_queue == found_queue));
    wire [QP-1:0]     mark_rung = at_turn ? turn_rung : next_rung;
    wire [QP-1:0]     mark_done = at_turn ? turn_done : next_done;
    always_ff @(posedge clk) begin
        if (sweeping || ring_valid) rung[sweeping ? sweep : ring_row] <= sweeping ? '0 : (rung[ring_row] & ~ring_col) | (~chosen[ring_row] & ring_col);
    end
    always_ff @(posedge clk) begin
        if (sweeping || marks) begin
            chosen[sweeping ? sweep : at_turn ? turn : next] <= sweeping ? '0 : (mark_done & ~mark_col) | ((mark_rung ^ {QP{again}}) & mark_col);
        end
    end

    // Functions with an active queue, and some that have none any more: that is found out when it would be their turn.
    logic [FUNCTIONS-1:0] has;
    always_ff @(posedge clk) begin
        for (int f = 0; f < FUNCTIONS; f++) begin
            if (of_next == '0 && next == LF_W'(f)) has[f] <= 1'b0;
            if ((ring_valid && ring_row == LF_W'(f)) || (again && turn == LF_W'(f))) has[f] <= 1'b1;
        end
        if (rst) has <= '0;
    end

    // ---- The next function after `turn` that has an active queue, `turn` itself last
    logic [FUNCTIONS-1:0] later;
    always_comb begin
        for (int f = 0; f < FUNCTIONS; f++) later[f] = has[f] && LF_W'(f) > turn;
    end
    function automatic logic [LF_W-1:0] lowest(input logic [FUNCTIONS-1:0] bits);
        lowest = '0;
        for (int f = FUNCTIONS - 1; f >= 0; f--) if (bits[f]) lowest = LF_W'(f);
    endfunction
    always_ff @(posedge clk) begin
        next <= later != '0 ? lowest(later) : lowest(has);
        any  <= !rst && has != '0;
    end

    // ---- Of both candidates the queue after the one served last
    (* ram_style = "distributed" *) logic [QP_W-1:0] served[FUNCTIONS];
    function automatic logic [QP_W-1:0] after(input logic [QP-1:0] bits, input logic [QP_W-1:0] previous);
        after = previous;
        for (int i = QP - 1; i >= 1; i--) if (bits[previous+QP_W'(i)]) after = previous + QP_W'(i);
    endfunction
    assign found       = stay || of_next != '0;
    assign found_queue = stay ? {turn, after(of_turn, served[turn])} : {next, after(of_next, served[next])};

    always_ff @(posedge clk) begin
        if (choose) begin
            turn <= found_queue[QUEUE_W-1:QP_W];
            if (!stay) credit <= weights[next];
        end else if (spend) begin
            credit <= credit - 4'(spend_count);
        end
        if (rst) {turn, credit} <= '0;
    end
    // A queue that got only the rest of a turn is the first of the next one, or else the same queues would get the rests.
    logic stayed;
    wire  rest = spend && stayed && 4'(spend_count) == credit;
    always_ff @(posedge clk) begin
        if (choose) stayed <= stay;
        if (choose || rest) served[choose ? found_queue[QUEUE_W-1:QP_W] : turn] <= choose ? found_queue[QP_W-1:0] : again_queue[QP_W-1:0] - 1'b1;
    end

`ifndef SYNTHESIS
    always_ff @(posedge clk) begin
        if (!rst) begin
            assert (!choose || (found && (stay ? of_turn[found_queue[QP_W-1:0]] : of_next[found_queue[QP_W-1:0]])))
            else $fatal(1, "queue_arbiter: queue %0d is chosen, though idle", found_queue);
            assert (!again || again_queue[QUEUE_W-1:QP_W] == turn) else $fatal(1, "queue_arbiter: more of queue %0d, which was not chosen", again_queue);
            assert (!(choose && (again || spend))) else $fatal(1, "queue_arbiter: a choice before the last was done");
            assert (!spend || 4'(spend_count) <= credit) else $fatal(1, "queue_arbiter: more picked than the turn has");
        end
    end
`endif
endmodule
`default_nettype wire
