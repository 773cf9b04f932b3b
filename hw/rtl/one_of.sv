// The number of the one bit that is set; 0 if none is. Combinational.
`default_nettype none
module one_of #(
    parameter int N = 4,
    localparam int W = N > 1 ? $clog2(N) : 1
) (
    input  wire  [N-1:0] bits,
    output logic [W-1:0] index
);
    always_comb begin
        index = '0;
        for (int i = 0; i < N; i++) if (bits[i]) index |= W'(i);
    end
endmodule
`default_nettype wire
