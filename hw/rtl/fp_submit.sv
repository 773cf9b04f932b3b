// FastPath's submission: requests become commands, and what the cores read of the window is made from these.
//
//      fp_control ── head, request ──► cut off 128 KiB ──► commands[space, place] ──► doorbell (bell_*)
//                                     │        ▲                  ├──► entries of the SQ ─┐
//                        issue_* ◄────┤        │                  └──► lists of pages ────┴► ans_*  ◄── ask_*
//                   (fp_complete)     └► counts: how many of the head's are made
//
// A command's place in the SQ is its number (CID), kept until its completion: so neither entries nor lists are ever stored. A place is used
// when the one after it is free: the ring never looks full. What is busy: `put_bit` and `got_bit` differ, so that each has one writer.
// A list's entry k is the page k + 1 pages after the buffer's first: lists lie where their address says whose they are.
// Cycles: 5 a command, in turn among spaces; an answer's beat a cycle, when the host leaves one free.
`default_nettype none
module fp_submit
    import millrace_pkg::*;
#(
    parameter int SPACES   = 1,
    parameter int PAGES    = 512,              // the last of the table's is the window
    localparam int SPACE_W = SPACES > 1 ? $clog2(SPACES) : 1,
    localparam int AT_W    = $clog2(SPACES * 32)
) (
    input  wire                clk,
    input  wire                rst,
    input  wire                clear_want,
    input  wire                clear_valid,
    input  wire  [AT_W-1:0]    clear_at,
    output logic               still,
    // fp_control
    input  wire  [SPACES-1:0]  pending,
    input  wire  [SPACES-1:0]  big,
    output logic [SPACE_W-1:0] head_space,
    input  wire  [4:0]         head_tag,
    output logic [AT_W-1:0]    request_at,
    input  wire request_t      request,
    output logic               pop,
    // fp_complete: requests that end without a command; how many commands a request has; whose a command was.
    output logic               end_valid,
    input  wire                end_ready,
    output logic [SPACE_W-1:0] end_space,
    output logic [4:0]         end_tag,
    output status_t            end_status,
    output logic               issue_valid,
    output logic [AT_W-1:0]    issue_at,
    output logic               issue_all,
    output logic [11:0]        issue_count,
    input  wire  [AT_W-1:0]    look_at,
    output logic               look_busy,
    output logic [4:0]         look_tag,
    input  wire                look_done,      // it has completed
    input  wire                took_valid,     // a completion entry was taken from this place of a CQ
    input  wire  [SPACE_W-1:0] took_space,
    input  wire  [4:0]         took_index,
    // Doorbells of the spaces' queues
    output logic               bell_valid,
    input  wire                bell_ready,
    output logic [SPACE_W-1:0] bell_space,
    output logic               bell_cq,
    output logic [4:0]         bell_value,
    // Reads of the window
    input  wire                ask_valid,
    output logic               ask_ready,
    input  wire  [13:0]        ask_addr,       // bits 17:4
    input  wire  [4:0]         ask_beats,
    input  wire  [11:0]        ask_tag,
    output logic               ans_valid,
    input  wire                ans_ready,
    output logic [11:0]        ans_tag,
    output logic [127:0]       ans_data,
    output logic               ans_last,
    output logic               busy
);
    localparam int ROWS = SPACES;
    typedef struct packed {
        logic [3:0]  opcode;
        logic        durable;
        logic        listed;    // more than two pages
        logic [7:0]  nlb_z;
        logic [27:0] offset;
        logic [48:0] lba;       // bit 48: beyond all blocks that there can be
    } made_t;

    // ---- From request to command
    typedef enum logic [2:0] {PICK, TAG, READ, CUT, PUT, FAIL} step_t;
    step_t              step;
    wire                any;
    wire  [SPACES-1:0]  grant;
    wire  [SPACE_W-1:0] turn;
    logic [SPACE_W-1:0] space;
    logic [4:0]         tag;
    request_t           r;
    logic               last;
    logic [7:0]         nlb_z;
    logic [4:0]         tails[ROWS];
    logic [10:0]        counts[ROWS];   // commands made of the request at the head
    logic [10:0]        count;
    wire  [4:0]         tail = tails[space];
    wire                many = big[space];
    wire                made = step == PUT;
    wire                choose = step == PICK && !clear_want;

    arbiter #(.N(SPACES)) turns (.clk, .rst, .request(pending), .take(choose), .any, .grant, .index(turn));

    (* ram_style = "distributed" *) logic put_bit[SPACES * 32];
    (* ram_style = "distributed" *) logic got_bit[SPACES * 32];
    wire [AT_W-1:0] after   = AT_W'({space, tail + 5'd1});
    wire            no_room = put_bit[after] != got_bit[after];
    always_ff @(posedge clk) begin
        unique case (step)
            PICK: if (choose && any) step <= TAG;
            TAG: step <= no_room ? PICK : READ;
            READ: step <= request.wrong != FP_GOOD ? FAIL : CUT;
            CUT: step <= PUT;
            PUT: step <= PICK;
            default: if (end_ready) step <= PICK;
        endcase
        if (step == PICK) space <= turn;
        if (rst) step <= PICK;
    end
    assign head_space = space;
    assign request_at = AT_W'({space, tag});
    assign still      = step == PICK;

    // The command is 128 KiB of it: 256 or 32 blocks; the last one is the rest. Flush has no blocks, and is one command.
    wire        flush  = r.opcode == OP_FLUSH[3:0];
    wire [10:0] of     = many ? r.blocks_z[15:5] : {3'b0, r.blocks_z[15:8]};
    wire        at_end = flush || count == of;
    wire [7:0]  most_z = many ? 8'd31 : 8'd255;
    logic [27:0] offset;
    logic [48:0] lba;
    always_ff @(posedge clk) begin
        if (step == TAG) tag <= head_tag;
        if (step == READ) {r, count} <= {request, counts[space]};
        if (step == CUT) begin
            last   <= at_end;
            nlb_z  <= flush ? 8'd0 : at_end ? r.blocks_z[7:0] & most_z : most_z;
            offset <= {r.offset[27:15] + {2'b0, count}, r.offset[14:0]};
            lba    <= {1'b0, r.lba} + (many ? {33'b0, count, 5'b0} : {30'b0, count, 8'b0});
        end
    end
    assign pop = (made && last) || (step == FAIL && end_ready);

    // The command: how far it reaches from its first page's begin, in units of 4 bytes.
    wire [14:0] size_z = many ? {nlb_z[4:0], 10'h3ff} : {nlb_z, 7'h7f};
    wire [15:0] end_z  = {6'b0, offset[9:0]} + {1'b0, size_z};
    (* ram_style = "distributed" *) logic [$bits(made_t)-1:0] commands[SPACES * 32];
    (* ram_style = "distributed" *) logic [4:0] tags[SPACES * 32];
    wire [AT_W-1:0] at = AT_W'({space, tail});
    wire made_t     command = '{opcode: r.opcode, durable: r.durable, listed: end_z[15:11] != '0, nlb_z: nlb_z, offset: offset, lba: lba};
    wire [AT_W-1:0] got_at = clear_valid ? clear_at : look_at;
    always_ff @(posedge clk) begin
        if (made) commands[at] <= command;
        if (made) tags[at] <= tag;
        if (made) put_bit[at] <= !got_bit[at];
        if (clear_valid || look_done) got_bit[got_at] <= put_bit[got_at];
    end
    assign look_busy   = put_bit[look_at] != got_bit[look_at];
    assign look_tag    = tags[look_at];
    assign issue_valid = made;
    assign issue_at    = request_at;
    assign issue_all   = last;
    assign issue_count = {1'b0, count} + 12'd1;

    assign end_valid = step == FAIL;
    assign end_space = space;
    assign end_tag   = tag;
    always_comb begin
        unique case (r.wrong)
            FP_OPCODE: end_status = ST_INVALID_OPCODE;
            FP_FIELD: end_status = ST_INVALID_FIELD;
            default: end_status = ST_DATA_TRANSFER_ERROR;
        endcase
    end

    // ---- Doorbells: the newest value of each
    logic [SPACES-1:0]  tail_rings, head_rings;
    logic [4:0]         c_heads[ROWS];
    wire                ring;
    wire [2*SPACES-1:0] ring_of;
    wire [$clog2(2*SPACES)-1:0] ring_index;
    wire                offer = !bell_valid || bell_ready;
    wire [SPACE_W-1:0]  ring_space = SPACE_W'({1'b0, ring_index} >> 1);
    logic [2*SPACES-1:0] rings;
    always_comb begin
        for (int s = 0; s < SPACES; s++) rings[2*s +: 2] = {head_rings[s], tail_rings[s]};
    end
    arbiter #(.N(2 * SPACES)) bells (.clk, .rst, .request(rings), .take(offer), .any(ring), .grant(ring_of), .index(ring_index));
    wire fresh = clear_valid && clear_at[4:0] == '0;
    always_ff @(posedge clk) begin
        for (int s = 0; s < SPACES; s++) begin
            if (offer && ring_of[2*s]) tail_rings[s] <= 1'b0;
            if (offer && ring_of[2*s+1]) head_rings[s] <= 1'b0;
            if (made && space == SPACE_W'(s)) begin
                tail_rings[s] <= 1'b1;
                tails[s]      <= tail + 5'd1;
                counts[s]     <= last ? '0 : count + 11'd1;
            end
            if (took_valid && took_space == SPACE_W'(s)) begin
                head_rings[s] <= 1'b1;
                c_heads[s]    <= took_index + 5'd1;
            end
            if (rst || (fresh && ({1'b0, clear_at} >> 5) == (AT_W + 1)'(s))) begin
                {tail_rings[s], head_rings[s]} <= '0;
                {tails[s], counts[s]} <= '0;
            end
        end
        if (offer) begin
            bell_valid <= ring;
            bell_space <= ring_space;
            bell_cq    <= ring_index[0];
            bell_value <= ring_index[0] ? c_heads[ring_space] : tails[ring_space];
        end
        if (rst) bell_valid <= 1'b0;
    end

    // ---- Reads of the window: 13 a list, 12 the CQ (which nobody reads), else the SQ
    logic        answers;
    logic [13:0] a_addr;
    logic [4:0]  a_left;
    logic [11:0] a_tag;
    wire         forth = answers && (!ans_valid || ans_ready);
    assign ask_ready = !answers;
    always_ff @(posedge clk) begin
        if (ask_valid && ask_ready) begin
            answers <= 1'b1;
            {a_addr, a_left, a_tag} <= {ask_addr, ask_beats, ask_tag};
        end else if (forth) begin
            answers      <= a_left != 5'd1;
            a_left       <= a_left - 5'd1;
            a_addr[9:0]  <= a_addr[9:0] + 10'd1;
        end
        if (forth) ans_valid <= 1'b1;
        else if (ans_ready) ans_valid <= 1'b0;
        if (rst) begin
            answers   <= 1'b0;
            ans_valid <= 1'b0;
        end
    end
    wire        a_list  = a_addr[9];
    wire [4:0]  a_index = a_list ? a_addr[8:4] : a_addr[6:2];
    wire made_t a       = commands[AT_W'({SPACE_W'(a_addr[13:10]), a_index})];
    wire [17:0] page    = a.offset[27:10] + {13'b0, a_list ? a_addr[3:0] : 4'b0, 1'b1};
    wire [17:0] page_2  = page + 18'd1;
    wire [63:0] list_at = 64'(PAGES - 1) << 21 | {46'b0, a_addr[13:10], 1'b1, a_index, 8'b0};
    always_ff @(posedge clk) begin
        if (forth) begin
            ans_tag  <= a_tag;
            ans_last <= a_left == 5'd1;
            ans_data <= '0;
            if (a_list) ans_data <= {34'b0, page_2, 12'b0, 34'b0, page, 12'b0};
            else begin
                unique case (a_addr[1:0])
                    2'd0: ans_data[63:0] <= {32'd1, 11'b0, a_index, 12'b0, a.opcode};
                    2'd1: ans_data[127:64] <= {34'b0, a.offset, 2'b0};
                    2'd2: ans_data <= {15'b0, a.lba, a.listed ? list_at : {34'b0, page, 12'b0}};
                    default: ans_data[31:0] <= {1'b0, a.durable, 22'b0, a.nlb_z};
                endcase
            end
        end
    end

    assign busy = step != PICK || bell_valid || ring || answers || ans_valid;

    wire unused = &{1'b0, grant, end_z[10:0]};

`ifndef SYNTHESIS
    always_ff @(posedge clk) begin
        if (!rst) begin
            assert (!made || put_bit[at] == got_bit[at]) else $fatal(1, "fp_submit: place %0d is in use", at);
            assert (!(clear_valid && (look_done || made))) else $fatal(1, "fp_submit: cleared while somebody works");
        end
    end
`endif
endmodule
`default_nettype wire
