// Some 64-bit counters of events, small: the sums lie in distributed RAM in bytes, which one adder of 8 bits visits in turn, a counter's
// from the lowest on; what happens between two rounds is counted in a few bits beside it.
//
//      event[i] ─► few[i] ──(lowest byte)──► + ◄─► sums[counter, byte]
//                              carry ───────►┘ └──► read_data, byte by byte
//
// Cycles: a round takes 8 N; a sum is at most a round behind. A read (`read_valid` held) is answered when its counter's turn has passed,
// within two rounds.
// Invariant: few[i] <= 8 N, for each is added to its sum, and starts anew, every 8 N cycles.
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
    if (N < 2 || N > 16 || (1 << W) != N) begin : g_check
        $error("counters: N must be a power of two, 2 to 16");
    end
    localparam int FEW = W + 4;

    (* ram_style = "distributed" *) logic [7:0] sums[N * 8];
    logic [N-1:0][FEW-1:0] few;
    logic [W+2:0]          turn;    // counter, byte
    logic                  carry;
    logic [W+3:0]          cleared; // in the first round after reset, sums start at zero
    wire                   clearing = !cleared[W+3];
    wire [W-1:0]           counter  = turn[W+2:3];
    wire                   lowest   = turn[2:0] == '0;
    wire [7:0]             more     = lowest ? 8'(few[counter]) : {7'b0, carry};
    wire [8:0]             sum      = {1'b0, clearing ? 8'd0 : sums[turn]} + {1'b0, more};

    always_ff @(posedge clk) sums[turn] <= sum[7:0];

    // All bytes from the lowest on were seen by whoever waited since then.
    logic whole;
    always_ff @(posedge clk) begin
        turn  <= turn + 1'b1;
        carry <= sum[8];
        if (clearing) cleared <= cleared + 1'b1;
        for (int i = 0; i < N; i++) few[i] <= (lowest && counter == W'(i) ? '0 : few[i]) + FEW'(count[i]);
        if (lowest) whole <= read_valid && !read_done && !clearing && counter == read_index;
        read_done <= whole && turn[2:0] == 3'd7;
        read_data <= {sum[7:0], read_data[63:8]};
        if (rst) begin
            turn      <= '0;
            cleared   <= '0;
            few       <= '0;
            whole     <= 1'b0;
            read_done <= 1'b0;
        end
    end

`ifndef SYNTHESIS
    always_ff @(posedge clk) if (!rst) begin
        for (int i = 0; i < N; i++) assert (few[i] <= FEW'(8 * N)) else $fatal(1, "counters: %0d events between two visits", few[i]);
    end
`endif
endmodule
`default_nettype wire
