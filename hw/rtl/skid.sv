// A register slice: cuts every path between two modules, `ready` included, without losing a cycle.
//
//      in_* ──► spare ─┐
//         └────────────┴─► out_*        (spare: what came while the receiver said no)
//
// Place: at a module's boundary where a `ready` would otherwise be a long combinational path.
// Cycles: one from in to out; one word per cycle.
// Invariants: the spare is full only while out_valid; in_ready = spare empty; words leave in the order in which they came.
`default_nettype none

module skid #(
    parameter int WIDTH = 8
) (
    input  wire logic             clk,
    input  wire logic             rst,

    input  wire logic             in_valid,
    output logic                  in_ready,
    input  wire logic [WIDTH-1:0] in_data,

    output logic                  out_valid,
    input  wire logic             out_ready,
    output logic [WIDTH-1:0]      out_data
);
    if (WIDTH < 1) begin : g_width
        $error("skid: WIDTH must be at least 1");
    end

    logic             spare_full;
    logic [WIDTH-1:0] spare;

    assign in_ready = !spare_full;

    always_ff @(posedge clk) begin
        if (rst) begin
            out_valid  <= 1'b0;
            spare_full <= 1'b0;
        end else if (!out_valid || out_ready) begin
            out_valid  <= in_valid || spare_full;
            spare_full <= 1'b0;
        end else if (in_valid && in_ready) begin
            spare_full <= 1'b1;
        end
    end

    always_ff @(posedge clk) begin
        if (in_ready) spare <= in_data;
        if (!out_valid || out_ready) out_data <= spare_full ? spare : in_data;
    end

`ifndef SYNTHESIS
    always_ff @(posedge clk) begin
        if (!rst) assert (out_valid || !spare_full);
    end
`endif
endmodule

`default_nettype wire
