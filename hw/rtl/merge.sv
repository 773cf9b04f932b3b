// N streams into one, in turn, with one register behind the choice:
//
//      in[0] ─┐
//      in[1] ─┼─ arbiter ─► register ─► out (and from whom)
//      in[N] ─┘
//
// One transfer a cycle, one cycle from in to out. Transfers of one input keep their order. `in_ready` depends on `in_valid` (the choice),
// never the other way round.
`default_nettype none
module merge #(
    parameter int N = 2,
    parameter int WIDTH = 8,
    localparam int W = N > 1 ? $clog2(N) : 1
) (
    input  wire                     clk,
    input  wire                     rst,
    input  wire  [N-1:0]            in_valid,
    output logic [N-1:0]            in_ready,
    input  wire  [N-1:0][WIDTH-1:0] in_data,
    output logic                    out_valid,
    input  wire                     out_ready,
    output logic [WIDTH-1:0]        out_data,
    output logic [W-1:0]            out_from
);
    wire          room = !out_valid || out_ready;
    wire          any;
    wire  [N-1:0] grant;
    wire  [W-1:0] index;
    logic [WIDTH-1:0] chosen;

    arbiter #(.N(N)) arbiter (.clk, .rst, .request(in_valid), .take(room), .any, .grant, .index);

    assign in_ready = grant & {N{room}};

    if (N == 1) begin : g_one
        assign chosen = in_data[0];
    end else begin : g_choose
        always_comb begin
            chosen = '0;
            for (int i = 0; i < N; i++) chosen |= in_data[i] & {WIDTH{grant[i]}};
        end
    end

    always_ff @(posedge clk) begin
        if (room) begin
            out_valid <= any;
            out_data  <= chosen;
            out_from  <= index;
        end
        if (rst) out_valid <= 1'b0;
    end
endmodule
`default_nettype wire
