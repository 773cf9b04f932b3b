// FastPath's completion: what the cores write into the window, joined into requests; their records.
//
//      w_* (entries of CQs) ─► FIFO ─► whose? ─► joined[request] ─all of it─► record rec_* ─► host
//            └─ took_* ─► fp_submit (CQ head)      ▲    ▲                └──► stat_* ─► fp_statistics
//      end_* (ended without a command) ────────────┘    └ issue_*: of how many; go_*: since when
//
// A request's first status that is not success is its status. An entry of a command that is not in flight is dropped: who writes into
// the window but a core's own queue? Rows of `joined` are zero between requests: cleared here, so that they have one writer.
// Cycles: 5 an entry that ends a request, 4 another.
`default_nettype none
module fp_complete
    import millrace_pkg::*;
#(
    parameter int SPACES   = 1,
    localparam int SPACE_W = SPACES > 1 ? $clog2(SPACES) : 1,
    localparam int AT_W    = $clog2(SPACES * 32)
) (
    input  wire                clk,
    input  wire                rst,
    input  wire                clear_want,
    input  wire                clear_valid,
    input  wire  [AT_W-1:0]    clear_at,
    output logic               still,
    // Writes of the window
    input  wire                w_valid,
    output logic               w_ready,
    input  wire  [13:0]        w_addr,       // bits 17:4
    input  wire  [31:0]        w_data,       // an entry's last dword
    // fp_submit
    output logic               took_valid,
    output logic [SPACE_W-1:0] took_space,
    output logic [4:0]         took_index,
    output logic [AT_W-1:0]    look_at,
    input  wire                look_busy,
    input  wire  [4:0]         look_tag,
    output logic               look_done,
    input  wire                end_valid,
    output logic               end_ready,
    input  wire  [SPACE_W-1:0] end_space,
    input  wire  [4:0]         end_tag,
    input  wire status_t       end_status,
    input  wire                issue_valid,
    input  wire  [AT_W-1:0]    issue_at,
    input  wire                issue_all,
    input  wire  [11:0]        issue_count,
    // fp_control
    input  wire                go_valid,
    input  wire  [AT_W-1:0]    go_at,
    output logic               ended_valid,
    output logic [AT_W-1:0]    ended_at,
    output logic [SPACE_W-1:0] ended_space,
    input  wire  [38:0]        ring_base,    // of ended_space, combinational
    input  wire  [15:0]        ring_refused,
    // Records
    output logic               rec_valid,
    input  wire                rec_ready,
    output logic [63:0]        rec_addr,
    output logic [127:0]       rec_data,
    // fp_statistics: taken with the record.
    input  wire                stat_ready,
    output logic [31:0]        stat_cycles,
    output logic               busy
);
    localparam int ROWS = SPACES;

    // ---- Entries
    wire                in_queue = w_addr[9:8] == 2'b01 && int'(w_addr[13:10]) < SPACES;
    wire                f_valid, f_room;
    logic               f_take;
    wire  [SPACE_W-1:0] f_space;
    wire  [4:0]         f_cid;
    status_t            f_status;
    wire  [5:0]         f_count;
    fifo #(.WIDTH(SPACE_W + 5 + 15), .DEPTH(32)) entries (
        .clk, .rst, .in_valid(w_valid && in_queue), .in_ready(f_room), .in_data({SPACE_W'(w_addr[13:10]), w_data[4:0], w_data[31:17]}),
        .out_valid(f_valid), .out_ready(f_take), .out_data({f_space, f_cid, f_status}), .count(f_count)
    );
    assign w_ready    = f_room;
    assign took_valid = w_valid && in_queue && f_room;
    assign took_space = SPACE_W'(w_addr[13:10]);
    assign took_index = w_addr[4:0];

    // ---- One at a time
    typedef enum logic [2:0] {NEXT, OWNER, JOIN, JUDGE, RECORD} step_t;
    typedef struct packed {
        status_t     status;
        logic [11:0] count;
    } joined_t;
    step_t              step;
    logic               direct;    // ended without a command
    logic [SPACE_W-1:0] space;
    logic [4:0]         cid, tag;
    status_t            status;
    (* ram_style = "distributed" *) logic [$bits(joined_t)-1:0] joined[SPACES * 32];
    (* ram_style = "distributed" *) logic [12:0] issued[SPACES * 32];  // all of them, how many
    (* ram_style = "distributed" *) logic [31:0] began[SPACES * 32];
    logic [31:0]        now;
    logic [11:0]        count, of;
    logic               all;
    wire [AT_W-1:0]     at     = AT_W'({space, tag});
    wire joined_t       sofar = joined[at];
    wire                ends   = direct || (all && count == of);
    wire                judged = step == JUDGE && (!ends || stat_ready);
    assign f_take    = step == NEXT && !clear_want && f_valid;
    assign end_ready = step == NEXT && !clear_want && !f_valid;
    assign still     = step == NEXT;
    assign look_at   = AT_W'({space, cid});
    assign look_done = step == OWNER && look_busy;
    always_ff @(posedge clk) begin
        unique case (step)
            NEXT: begin
                direct <= !f_valid;
                space  <= f_valid ? f_space : end_space;
                cid    <= f_cid;
                tag    <= end_tag;
                status <= f_valid ? f_status : end_status;
                if (f_take) step <= OWNER;
                else if (end_ready && end_valid) step <= JOIN;
            end
            OWNER: begin
                tag  <= look_tag;
                step <= look_busy ? JOIN : NEXT;
            end
            JOIN: begin
                if (!direct && sofar.status != '0) status <= sofar.status;
                count <= sofar.count + 12'd1;
                {all, of} <= issued[at];
                stat_cycles <= now - began[at];
                step <= JUDGE;
            end
            JUDGE: if (judged) step <= ends ? RECORD : NEXT;
            default: if (rec_ready) step <= NEXT;
        endcase
        if (rst) step <= NEXT;
    end

    wire [AT_W-1:0] joined_at = clear_valid ? clear_at : at;
    always_ff @(posedge clk) begin
        now <= rst ? '0 : now + 32'd1;
        if (issue_valid) issued[issue_at] <= {issue_all, issue_count};
        if (go_valid) began[go_at] <= now;
    end
    always_ff @(posedge clk) begin
        if (clear_valid || (judged && !direct)) joined[joined_at] <= clear_valid || ends ? '0 : {status, count};
    end

    // ---- Records
    logic [5:0] tails[ROWS];       // phase (inverted), place
    assign rec_valid   = step == RECORD;
    assign rec_addr    = {16'b0, ring_base, tails[space][4:0], 4'b0};
    assign rec_data    = {status, !tails[space][5], 11'b0, tag, 16'b0, ring_refused, 32'b0, stat_cycles};
    assign ended_valid = rec_valid && rec_ready;
    assign ended_at    = at;
    assign ended_space = space;
    always_ff @(posedge clk) begin
        for (int s = 0; s < SPACES; s++) begin
            if (ended_valid && space == SPACE_W'(s)) tails[s] <= tails[s] + 6'd1;
            if (rst || (clear_valid && ({1'b0, clear_at} >> 5) == (AT_W + 1)'(s))) tails[s] <= '0;
        end
    end
    assign busy = step != NEXT || f_valid;

    wire unused = &{1'b0, f_count, w_addr[7:5], w_data[16:5]};

`ifndef SYNTHESIS
    always_ff @(posedge clk) begin
        if (!rst) begin
            assert (step != JUDGE || direct || !all || count <= of) else $fatal(1, "fp_complete: request %0d: %0d commands of %0d", at, count, of);
        end
    end
`endif
endmodule
`default_nettype wire
