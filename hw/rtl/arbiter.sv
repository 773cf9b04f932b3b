// Round robin: of those that ask, the one that comes next after the last one taken. Combinational from `request` to `grant`; the turn
// moves at the clock edge, and only when `take` says that the grant was used, so that an offer stays until it is taken.
//
// Invariants: `grant` is one of `request` or zero; whoever asks without pause is granted within N takes.
`default_nettype none
module arbiter #(
    parameter int N = 4,
    localparam int W = N > 1 ? $clog2(N) : 1
) (
    input  wire          clk,
    input  wire          rst,
    input  wire  [N-1:0] request,
    input  wire          take,
    output logic         any,
    output logic [N-1:0] grant,
    output logic [W-1:0] index
);
    if (N < 1) begin : g_check
        $error("arbiter: N must be at least 1");
    end

    assign any = |request;

    if (N == 1) begin : g_one
        assign grant = request;
        assign index = '0;
        wire unused = &{1'b0, clk, rst, take};
    end else begin : g_many
        logic [N-1:0] after;  // those whose turn comes before it starts again at 0
        wire  [N-1:0] first = request & after;
        wire  [N-1:0] from = |first ? first : request;
        assign grant = from & (~from + N'(1));  // the lowest bit
        always_comb begin
            index = '0;
            for (int i = 0; i < N; i++) if (grant[i]) index |= W'(i);
        end
        always_ff @(posedge clk) begin
            if (rst) after <= '1;
            else if (take && any) after <= ~(grant | (grant - N'(1)));
        end
    end

`ifndef SYNTHESIS
    always_ff @(posedge clk) if (!rst) begin
        assert ($onehot0(grant) && (grant & ~request) == '0 && any == (grant != '0))
        else $fatal(1, "arbiter: grant %b of %b", grant, request);
    end
`endif
endmodule
`default_nettype wire
