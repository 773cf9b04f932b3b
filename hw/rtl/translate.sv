// A command's PRPs become host addresses; its words go where those look who need them.
//
//   d_* ──► step 0: take, look up PRP1
//           step 1: PRP1's page is there; words 0 and 3; how many pages?; look up PRP2
//           step 2: PRP2's page is there; words 4; info ──► functions, job ──► prp_list
//           step 3: word 6; p_* ──► functions
//                      m_* ──► ssd_memory: the entry of this slot, 8 words of 64 bits, of which 1, 2 and 7 are always zero
//
// One page: PRP2 is not looked at. Two: it is the second. More: it is a list's address, and prp_list's business.
// What is wrong here is `late`, because the storage functions' refusals come first: PRP Offset Invalid, Data Transfer Error.
// Of CDW12 a disk is given NLB, LR, FUA and DEAC; what our software ignores never gets there.
// Configuration word 0 (3000h): bit 34 blocks of 4096 bytes, bit 46 every write is to be durable (the guest's write cache is off).
// Invariant: all words of a slot are written before `p_*` offers it.
// Cycles: 4 a command.
`default_nettype none

module translate
    import millrace_pkg::*;
#(
    parameter int  LF     = 16,
    parameter int  PAGES  = 512,
    localparam int PAGE_W = $clog2(PAGES),
    localparam int LIST_W = PAGE_W + 18   // guest address bits PAGE_W+20:3
) (
    input  wire logic               clk,
    input  wire logic               rst,

    input  wire logic               cfg_wr_en,
    input  wire logic [11:0]        cfg_wr_addr,
    input  wire logic [63:0]        cfg_wr_data,

    input  wire logic               d_valid,
    output      logic               d_ready,
    input  wire command_t           d,

    // To page_table, and its answer in the next cycle.
    output      logic               look_valid,
    output      logic [LF_W-1:0]    look_lf,
    output      logic [PAGE_W-1:0]  look_page,
    output      logic               look_high,
    input  wire logic               look_present,
    input  wire logic               look_writable,
    input  wire logic [26:0]        look_frame,

    // To ssd_memory: {slot, beat}, for the lower and the upper half of 16 bytes. Always taken.
    output      logic               low_en,
    output      logic [SLOT_W+1:0]  low_addr,
    output      logic [63:0]        low_data,
    output      logic               high_en,
    output      logic [SLOT_W+1:0]  high_addr,
    output      logic [63:0]        high_data,

    // To functions' table, and to prp_list's: of `info_slot`.
    output      logic               info_en,
    output      logic [SLOT_W-1:0]  info_slot,
    output      logic [63:0]        info_slba,
    output      logic [31:0]        info_nsid,
    output      logic [15:0]        info_nlb_z,
    output      logic [7:0]         info_opcode,
    output      logic [5:0]         job_entries,   // of the list; 0: there is none
    output      logic               job_to_guest,  // its pages will be written
    output      logic               job_high,
    output      logic [LIST_W-1:0]  job_list,

    output      logic               p_valid,
    input  wire logic               p_ready,
    output      passed_t            p
);
    localparam int TOP = PAGE_W + 21; // first address bit above the table

    logic [1:0]        step;
    logic              waits;    // in step 3 for longer than a cycle: its word is written, the memory is for others
    logic [SLOT_W-1:0] slot;
    logic [QUEUE_W-1:0] queue;
    logic [3:0]        opcode;   // of those that decode lets through
    logic [20:0]       prp1;
    logic [TOP-1:0]    prp2;
    logic              prp2_high;
    logic [63:0]       slba;
    logic [31:0]       nsid;
    logic [15:0]       nlb_z;
    logic [2:0]        flags;    // LR, FUA, DEAC
    logic              ended;
    logic              late;
    status_t           status;
    logic              bad1;     // PRP1's page is not there
    logic [5:0]        rest;     // pages after the first

    // ---- What is known of a function
    localparam int LFI_W = LF > 1 ? $clog2(LF) : 1;
    (* ram_style = "distributed" *) logic [1:0] kinds[1 << LFI_W];
    wire [LFI_W-1:0] lf = LFI_W'(queue[QUEUE_W-1 -: LF_W]);
    wire [1:0] kind = kinds[lf];
    always_ff @(posedge clk) begin
        if (cfg_wr_en && cfg_wr_addr[3:0] == 4'd0) kinds[LFI_W'(cfg_wr_addr[11:4])] <= {cfg_wr_data[46], cfg_wr_data[34]};
    end

    wire is_flush   = opcode == OP_FLUSH[3:0];
    wire is_read    = opcode == OP_READ[3:0];
    wire is_zeroes  = opcode == OP_WRITE_ZEROES[3:0];
    wire is_write   = opcode == OP_WRITE[3:0];
    wire moves_data = !is_flush && !is_zeroes;

    // ---- Steps
    assign d_ready = step == 2'd0;
    assign p_valid = step == 2'd3;
    always_ff @(posedge clk) begin
        waits <= p_valid;
        if (rst) step <= 2'd0;
        else begin
            unique case (step)
                2'd0: if (d_valid) step <= 2'd1;
                2'd3: if (p_ready) step <= 2'd0;
                default: step <= step + 2'd1;
            endcase
        end
    end

    wire [17:0] size_z = kind[0] ? {1'b0, nlb_z[4:0], 12'hfff} : {1'b0, nlb_z[7:0], 9'h1ff};
    wire [17:0] last   = {6'b0, prp1[11:0]} + size_z; // offset of the last byte from the first page's begin
    wire        good   = look_present && (look_writable || !is_read);

    always_ff @(posedge clk) begin
        unique case (step)
            2'd0: begin
                slot      <= d.slot;
                queue     <= d.queue;
                opcode    <= d.opcode[3:0];
                prp1      <= d.prp1[20:0];
                prp2      <= d.prp2[TOP-1:0];
                prp2_high <= d.prp2[63:TOP] != '0;
                slba      <= d.slba;
                nsid      <= d.nsid;
                nlb_z     <= d.cdw12[15:0];
                flags     <= {d.cdw12[31], d.cdw12[30], d.cdw12[25]};
                ended     <= d.ended;
                late      <= d.late;
                status    <= d.status;
            end
            2'd1: begin
                bad1 <= !good;
                rest <= moves_data ? last[17:12] : '0;
            end
            2'd2: if (moves_data && !ended && !late) begin
                late <= 1'b1;
                if (bad1) status <= ST_DATA_TRANSFER_ERROR;
                else if (rest == 6'd1 && prp2[11:0] != '0) status <= ST_PRP_OFFSET_INVALID;
                else if (rest == 6'd1 && !good) status <= ST_DATA_TRANSFER_ERROR;
                else if (rest > 6'd1 && prp2[2:0] != '0) status <= ST_PRP_OFFSET_INVALID;
                else late <= 1'b0;
            end
            default: ;
        endcase
    end

    // ---- The table
    assign look_valid = (step == 2'd0 && d_valid) || step == 2'd1;
    assign look_lf    = step == 2'd0 ? d.queue[QUEUE_W-1 -: LF_W] : queue[QUEUE_W-1 -: LF_W];
    assign look_page  = step == 2'd0 ? d.prp1[TOP-1:21] : prp2[TOP-1:21];
    assign look_high  = step == 2'd0 ? d.prp1[63:TOP] != '0 : prp2_high;

    // ---- The disk's entry
    wire fua = flags[1] || (kind[1] && (is_write || is_zeroes));
    always_comb begin
        unique case (step)
            2'd1: low_data = {32'd1, 10'b0, slot, 8'b0, 4'b0, opcode};
            2'd2: low_data = rest == 6'd1 ? {16'b0, look_frame, prp2[20:0]} : '0;
            default: low_data = is_flush ? '0 : {32'b0, flags[2], fua, 4'b0, flags[0] && is_zeroes, 9'b0, nlb_z};
        endcase
    end
    assign low_en    = step == 2'd1 || step == 2'd2 || (step == 2'd3 && !waits);
    assign low_addr  = {slot, step == 2'd1 ? 2'd0 : step};
    assign high_en   = step == 2'd1;
    assign high_addr = {slot, 2'd1};
    assign high_data = moves_data ? {16'b0, look_frame, prp1} : '0;

    assign info_en      = step == 2'd2;
    assign info_slot    = slot;
    assign info_slba    = slba;
    assign info_nsid    = nsid;
    assign info_nlb_z   = nlb_z;
    assign info_opcode  = {4'b0, opcode};
    assign job_entries  = rest > 6'd1 ? rest : '0;
    assign job_to_guest = is_read;
    assign job_high     = prp2_high;
    assign job_list     = prp2[TOP-1:3];

    assign p = '{slot: slot, queue: queue, ssds: '0, ended: ended, late: late, status: status};

    wire unused = &{1'b0, cfg_wr_addr, cfg_wr_data, d.opcode[7:4], d.cdw12, last[11:0]};
endmodule

`default_nettype wire
