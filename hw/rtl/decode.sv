// An entry's four beats become one command; what the engine does not know is refused here.
//
//   f_* ──► beat 0: opcode, flags, CID, NSID ──► own_* (slots: whose it is)
//           beat 1: PRP1
//           beat 2: PRP2, SLBA            ──► d_* (translate), with the first three refusals below
//           beat 3: CDW12
//
// Refused: opcodes other than Flush, Write, Read, Compare and Write Zeroes (Invalid Opcode); fused operations and data pointers that are
// no PRPs (Invalid Field). `late`, because namespace, range and size are asked first, as the software does: Write Zeroes of the whole
// namespace (Invalid Field), PRP1 within a dword (PRP Offset Invalid). Namespace, range, size and write protection are checked by the
// storage functions' chain.
// Invariants: commands leave in the order of their entries; `own_*` comes before `d_*`.
// Cycles: 4 a command, the entry's; a command is offered in the cycle after its fourth beat, in which the next one's first is taken.
`default_nettype none

module decode
    import millrace_pkg::*;
(
    input  wire logic               clk,
    input  wire logic               rst,

    input  wire logic               f_valid,
    output      logic               f_ready,
    input  wire logic [1:0]         f_beat,
    input  wire logic [SLOT_W-1:0]  f_slot,
    input  wire logic [QUEUE_W-1:0] f_queue,
    input  wire logic [127:0]       f_data,

    output      logic               own_valid,
    output      logic [SLOT_W-1:0]  own_slot,
    output      owner_t             own,

    output      logic               d_valid,
    input  wire logic               d_ready,
    output      command_t           d
);
    command_t   e;      // the entry's words
    logic [1:0] fuse;
    logic [1:0] psdt;
    wire        take = f_valid && f_ready;

    assign f_ready = !d_valid || d_ready;

    always_ff @(posedge clk) begin
        if (rst) begin
            d_valid   <= 1'b0;
            own_valid <= 1'b0;
        end else begin
            if (take && f_beat == 2'd3) d_valid <= 1'b1;
            else if (d_ready) d_valid <= 1'b0;
            own_valid <= take && f_beat == 2'd0;
        end
    end

    always_ff @(posedge clk) begin
        {e.ended, e.late, e.status} <= '0;
        if (take) begin
            unique case (f_beat)
                2'd0: begin
                    e.slot   <= f_slot;
                    e.queue  <= f_queue;
                    e.opcode <= f_data[7:0];
                    fuse     <= f_data[9:8];
                    psdt     <= f_data[15:14];
                    own.cid  <= f_data[31:16];
                    e.nsid   <= f_data[63:32];
                end
                2'd1: e.prp1 <= f_data[127:64];
                2'd2: begin
                    e.prp2 <= f_data[63:0];
                    e.slba <= f_data[127:64];
                end
                default: e.cdw12 <= f_data[31:0];
            endcase
        end
    end
    assign own_slot  = e.slot;
    assign own.queue = e.queue;

    wire known      = e.opcode inside {OP_FLUSH, OP_WRITE, OP_READ, OP_COMPARE, OP_WRITE_ZEROES};
    wire moves_data = e.opcode inside {OP_WRITE, OP_READ, OP_COMPARE};
    wire whole      = e.opcode == OP_WRITE_ZEROES && e.cdw12[23]; // NSZ
    always_comb begin
        d        = e;
        d.ended  = 1'b0;
        d.late   = 1'b0;
        d.status = ST_SUCCESS;
        if (!known) begin
            d.ended  = 1'b1;
            d.status = ST_INVALID_OPCODE;
        end else if (fuse != '0 || psdt != '0) begin
            d.ended  = 1'b1;
            d.status = ST_INVALID_FIELD;
        end else if (whole) begin
            d.late   = 1'b1;
            d.status = ST_INVALID_FIELD;
        end else if (moves_data && e.prp1[1:0] != '0) begin
            d.late   = 1'b1;
            d.status = ST_PRP_OFFSET_INVALID;
        end
    end

`ifndef SYNTHESIS
    logic [1:0] expected;
    always_ff @(posedge clk) begin
        if (rst) expected <= '0;
        else if (take) begin
            assert (f_beat == expected) else $fatal(1, "decode: beat %0d of slot %0d came where %0d was due", f_beat, f_slot, expected);
            if (f_beat != 2'd0) assert (f_slot == e.slot) else $fatal(1, "decode: beats of slots %0d and %0d are mixed", f_slot, e.slot);
            expected <= expected + 2'd1;
        end
    end
`endif
endmodule

`default_nettype wire
