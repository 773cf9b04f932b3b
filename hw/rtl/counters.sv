// Some 64-bit counters of events, small: the sums lie in distributed RAM and are visited in turn by one adder; what happens between
// two visits is counted in a few bits beside it.
//
//      event[i] ─► few[i] ──(in turn)──► + ◄─► sums[i]
//
// Cycles: a sum is at most N cycles behind. A read (`read_valid` held) is answered when its counter's turn comes, within N + 1 cycles.
// Invariant: few[i] <= N, for each is added to its sum, and starts anew, every N cycles.
`default_nettype none
module counters #(
    parameter int N = 4, // a power of two, at least 2
    localparam int W = $clog2(N)
) (
    input  wire          clk,
    input  wire          rst,
    input  wire  [N-1:0] count,
    input  wire          read_valid,
    input  wire  [W-1:0] read_index,
    output logic         read_done,   // one cycle, with read_data
    output logic [63:0]  read_data
);
    if (N < 2 || (1 << W) != N) begin : g_check
        $error("counters: N must be a power of two, at least 2");
    end

    (* ram_style = "distributed" *) logic [63:0] sums[N];
    logic [N-1:0][W:0] few;
    logic [W-1:0]      turn;
    logic [W:0]        cleared; // in the first round after reset, sums start at zero
    wire               clearing = !cleared[W];
    wire [63:0]        sum = (clearing ? '0 : sums[turn]) + 64'(few[turn]);

    always_ff @(posedge clk) sums[turn] <= sum;

    always_ff @(posedge clk) begin
        turn <= turn + 1'b1;
        if (clearing) cleared <= cleared + 1'b1;
        for (int i = 0; i < N; i++) few[i] <= (turn == W'(i) ? '0 : few[i]) + (W + 1)'(count[i]);
        read_done <= read_valid && !read_done && !clearing && turn == read_index;
        read_data <= sum;
        if (rst) begin
            turn      <= '0;
            cleared   <= '0;
            few       <= '0;
            read_done <= 1'b0;
        end
    end

`ifndef SYNTHESIS
    always_ff @(posedge clk) if (!rst) begin
        for (int i = 0; i < N; i++) assert (few[i] <= (W + 1)'(N)) else $fatal(1, "counters: %0d events between two visits", few[i]);
    end
`endif
endmodule
`default_nettype wire
