// skid.sv: words leave in the order in which they came, none is lost, none is made up, and what is offered stays until it is taken.
//
// As in fifo_order.sv, any one word is watched: it is in `out_data` or, if one is ahead of it, in the spare.
`default_nettype none

module skid_order #(
    parameter int WIDTH = 3
) (
    input  wire logic             clk,
    input  wire logic             rst,
    input  wire logic             in_valid,
    input  wire logic [WIDTH-1:0] in_data,
    input  wire logic             out_ready,
    input  wire logic             watch,
    output      logic             reached
);
    logic in_ready, out_valid;
    logic [WIDTH-1:0] out_data;
    skid #(.WIDTH(WIDTH)) dut (.*);

    logic             watched, second, offered;
    logic [WIDTH-1:0] word, was;
    wire take = out_valid && out_ready;
    always_ff @(posedge clk) begin
        if (rst) begin
            watched <= 1'b0;
            offered <= 1'b0;
        end else begin
            if (!watched) begin
                if (watch && in_valid && in_ready) begin
                    watched <= 1'b1;
                    word    <= in_data;
                    second  <= out_valid && !out_ready;
                end
            end else if (take) begin
                if (second) second <= 1'b0;
                else watched <= 1'b0;
            end
            offered <= out_valid && !out_ready;
            was     <= out_data;
        end
    end

    always_ff @(posedge clk) begin
        if (!rst) begin
            if (watched && !second) assert (out_valid && out_data == word);
            if (watched && second) assert (dut.spare_full && dut.spare == word);
            if (offered) assert (out_valid && out_data == was);
        end
    end
    assign reached = !rst && watched && second;
endmodule
`default_nettype wire
