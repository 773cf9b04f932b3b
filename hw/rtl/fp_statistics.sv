// How long a space's requests took: 32 words of 48 bits for each space, in one memory.
//
//      in_* ─► row 0 count, 1 sum, 2 least, 3 greatest, 4 to 31 how many took 2^row to 2^(row+1) - 1 cycles ◄── read_*
//
// One row a cycle, 5 for a request; `in_ready` stays once it is there. Reads wait for them. Row 4 counts what was shorter, too.
`default_nettype none
module fp_statistics #(
    parameter int SPACES   = 1,
    localparam int SPACE_W = SPACES > 1 ? $clog2(SPACES) : 1,
    localparam int AT_W    = $clog2(SPACES * 32)
) (
    input  wire                clk,
    input  wire                rst,
    input  wire                clear_valid,
    input  wire  [AT_W-1:0]    clear_at,
    output logic               still,
    input  wire                in_valid,
    output logic               in_ready,
    input  wire  [SPACE_W-1:0] in_space,
    input  wire  [31:0]        in_cycles,
    input  wire                read_valid,  // until `read_done`, with the data
    input  wire  [AT_W-1:0]    read_at,
    output logic               read_done,
    output logic [63:0]        read_data
);
    logic               works;
    logic [SPACE_W-1:0] space;
    logic [31:0]        cycles;
    logic [2:0]         step;
    logic [4:0]         scale;
    always_comb begin
        scale = 5'd4;
        for (int bit_ = 5; bit_ < 32; bit_++) if (cycles[bit_]) scale = 5'(bit_);
    end

    assign in_ready = !works;
    assign still    = !works;
    always_ff @(posedge clk) begin
        if (in_valid && in_ready) begin
            works  <= 1'b1;
            space  <= in_space;
            cycles <= in_cycles;
            step   <= '0;
        end else begin
            step <= step + 3'd1;
            if (step == 3'd4) works <= 1'b0;
        end
        if (rst) works <= 1'b0;
    end

    (* ram_style = "distributed" *) logic [47:0] words[SPACES * 32];
    wire  [4:0]      row  = step[2] ? scale : {3'b0, step[1:0]};
    wire  [AT_W-1:0] at   = clear_valid ? clear_at : works ? AT_W'({space, row}) : read_at;
    wire  [47:0]     word = words[at];
    wire             less = cycles < word[31:0];
    logic            first;
    wire             keep = step[1] && !first && less == step[0];   // the least, the greatest stays
    wire  [47:0]     sum  = word + (step == 3'd1 ? {16'b0, cycles} : {47'b0, !step[1]});
    always_ff @(posedge clk) begin
        if (step == 3'd0) first <= word == '0;
        if (clear_valid || (works && !keep)) words[at] <= clear_valid ? '0 : step[1] ? {sum[47:32], cycles} : sum;
    end
    assign read_done = read_valid && !works && !clear_valid;
    assign read_data = {16'b0, word};
endmodule
`default_nettype wire
