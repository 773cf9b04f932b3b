// A queue of words in distributed RAM, for small depths.
//
//      in_* ──► write port ─► memory ─► read port ──► out_*
//                  tail ──────┐ ┌────── head
//                             count ──► in_ready, out_valid
//
// Place: wherever two modules of a core must not wait for each other within a few words.
// Cycles: a word written in cycle n is offered in cycle n+1; one word in and one out per cycle, also when full or empty
// next. `in_ready` and `out_valid` come from registers alone, `out_data` through one read of LUT RAM.
// Invariants: 0 <= count <= DEPTH; tail - head = count (mod DEPTH); words leave in the order in which they came.
`default_nettype none

module fifo #(
    parameter int WIDTH = 8,
    parameter int DEPTH = 16, // a power of two, at least 2
    localparam int W    = $clog2(DEPTH)
) (
    input  wire logic             clk,
    input  wire logic             rst,

    input  wire logic             in_valid,
    output logic                  in_ready,
    input  wire logic [WIDTH-1:0] in_data,

    output logic                  out_valid,
    input  wire logic             out_ready,
    output logic [WIDTH-1:0]      out_data,

    output logic [W:0]            count
);
    if (DEPTH < 2 || (1 << W) != DEPTH) begin : g_depth
        $error("fifo: DEPTH must be a power of two of at least 2");
    end
    if (WIDTH < 1) begin : g_width
        $error("fifo: WIDTH must be at least 1");
    end

    (* ram_style = "distributed" *) logic [WIDTH-1:0] memory[DEPTH];
    logic [W-1:0] head;
    logic [W-1:0] tail;
    logic [W:0]   used;
    logic         put;
    logic         take;

    assign in_ready  = !used[W]; // DEPTH is the only value with the top bit
    assign out_valid = used != '0;
    assign out_data  = memory[head];
    assign count     = used;
    assign put       = in_valid && in_ready;
    assign take      = out_valid && out_ready;

    always_ff @(posedge clk) begin
        if (put) memory[tail] <= in_data;
    end

    always_ff @(posedge clk) begin
        if (rst) begin
            head <= '0;
            tail <= '0;
            used <= '0;
        end else begin
            if (put) tail <= tail + 1'b1;
            if (take) head <= head + 1'b1;
            if (put && !take) used <= used + 1'b1;
            if (take && !put) used <= used - 1'b1;
        end
    end

`ifndef SYNTHESIS
    always_ff @(posedge clk) begin
        if (!rst) begin
            assert (used <= (W + 1)'(DEPTH));
            assert (W'(tail - head) == used[W-1:0]);
        end
    end
`endif
endmodule

`default_nettype wire
