// Stands for the generated chain in the tests of functions.sv: the same ports, and verdicts that a test can reckon.
//
// Pass: LBA = SLBA + configuration word 2 + state a * word 1 (its lower 8 bits), disks = word 0's. State a counts what passed. With word 3, the
// time between two that pass, state b is when the next may; who comes before is held. With word 4, all are rejected with it as status.
`default_nettype none

module fn_chain #(
    parameter int LATENCY = 3
) (
    input  wire logic        clk,
    input  wire logic        rst,
    input  wire logic        in_valid,
    input  wire logic [63:0] in_command_slba,
    input  wire logic [31:0] in_command_nsid,
    input  wire logic [31:0] in_command_now,
    input  wire logic [15:0] in_command_nlb_z,
    input  wire logic [7:0]  in_command_opcode,
    input  wire logic [63:0] in_state_a,
    input  wire logic [63:0] in_state_b,
    input  wire logic [63:0] in_config_namespace,
    input  wire logic [63:0] in_config_blocks,
    input  wire logic [63:0] in_config_share,
    input  wire logic [63:0] in_config_iops,
    input  wire logic [63:0] in_config_bytes,
    output      logic        out_valid,
    output      logic [7:0]  out_verdict_kind,
    output      logic [63:0] out_verdict_lba,
    output      logic [15:0] out_verdict_disks,
    output      logic [31:0] out_verdict_until,
    output      logic [15:0] out_verdict_status,
    output      logic [63:0] out_state_a,
    output      logic [63:0] out_state_b
);
    logic [LATENCY-1:0] due;
    logic [31:0]        seen_now;
    wire [31:0]         until_ = 32'(in_state_b);
    wire                held   = in_config_iops != '0 && $signed(in_command_now - until_) < 0;
    always_ff @(posedge clk) begin
        due <= rst ? '0 : {due[LATENCY-2:0], in_valid};
        if (in_valid) seen_now <= in_command_now;
        out_valid          <= due[LATENCY-2] && !rst;
        out_verdict_kind   <= in_config_bytes != '0 ? 8'd3 : held ? 8'd2 : 8'd0;
        out_verdict_lba    <= in_command_slba + in_config_share + 64'(in_state_a[47:0]) * 64'(in_config_blocks[7:0]);
        out_verdict_disks  <= in_config_namespace[63:48];
        out_verdict_until  <= until_;
        out_verdict_status <= in_config_bytes[15:0];
        out_state_a        <= in_state_a + 1;
        out_state_b        <= in_config_iops == '0 ? in_state_b + 64'(in_command_nlb_z) + 64'(in_command_opcode) : 64'(in_command_now) + in_config_iops;
    end
    wire unused = &{1'b0, in_command_nsid, in_config_blocks, in_config_namespace, in_state_a};

    // The contract's half that functions.sv has to keep.
    always_ff @(posedge clk) begin
        if (due != '0 && !rst) assert (in_command_now == seen_now) else $fatal(1, "fn_chain: the time changed while it was asked");
        if (!rst) assert (!(in_valid && due != '0)) else $fatal(1, "fn_chain: asked twice at once");
    end
endmodule

`default_nettype wire
