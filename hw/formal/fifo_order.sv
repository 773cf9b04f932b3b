// fifo.sv: words leave in the order in which they came, none is lost, none is made up.
//
// One word among all that ever enter is watched, any one: the solver chooses which. From then on its place in the memory is known,
// the words before it are counted (`ahead`); when it leaves, it is what it was. What holds for any word holds for all.
`default_nettype none

module fifo_order #(
    parameter int WIDTH = 3,
    parameter int DEPTH = 8,
    localparam int W    = $clog2(DEPTH)
) (
    input  wire logic             clk,
    input  wire logic             rst,
    input  wire logic             in_valid,
    input  wire logic [WIDTH-1:0] in_data,
    input  wire logic             out_ready,
    input  wire logic             watch, // this one, if none is watched
    output      logic             reached
);
    logic in_ready, out_valid;
    logic [WIDTH-1:0] out_data;
    logic [W:0] count;
    fifo #(.WIDTH(WIDTH), .DEPTH(DEPTH)) dut (.*);

    logic             watched;
    logic [W:0]       ahead;
    logic [WIDTH-1:0] word;
    wire put  = in_valid && in_ready;
    wire take = out_valid && out_ready;

    always_ff @(posedge clk) begin
        if (rst) begin
            watched <= 1'b0;
        end else if (!watched) begin
            if (watch && put) begin
                watched <= 1'b1;
                word    <= in_data;
                ahead   <= count - (W + 1)'(take);
            end
        end else if (take) begin
            if (ahead == '0) watched <= 1'b0;
            else ahead <= ahead - 1'b1;
        end
    end

    always_ff @(posedge clk) begin
        if (!rst && watched) begin
            assert (ahead < count);
            assert (dut.memory[dut.head + ahead[W-1:0]] == word);
            if (ahead == '0) assert (out_data == word);
        end
    end
    assign reached = !rst && watched && ahead == (W + 1)'(DEPTH - 1);
endmodule
`default_nettype wire
