// FastPath's front: programs' request words, and what the control processor says of their spaces (docs/hardware.md, FastPath).
//
//      bar_* ─► whose? ─► accumulator ─go─► checks ─► requests, by tag ─► fp_submit
//                                             │  └──► order, a FIFO of tags a space ─► pending, head_tag
//                                             └─ refused: counted
//      ended_* (fp_complete) ─► the tag is free
//      reg_* ─► spaces; statistics ─► stat_* (fp_statistics)
//
// A word is taken every cycle; a request lies there 4 cycles after its go. A tag is in use while its bits in `began` and `over` differ: so each has
// one writer, and the order cannot overflow. A request that is wrong otherwise goes the same way, and ends in fp_submit.
// After reset, and of a space that is enabled, all rows are cleared, one a cycle: here, in fp_complete and fp_statistics (`clear_*`), once nobody
// is in the middle of something (`still`); `clear_want` keeps them from beginning.
`default_nettype none
module fp_control
    import millrace_pkg::*;
#(
    parameter int SPACES   = 1,
    parameter int CORES    = 1,
    localparam int SPACE_W = SPACES > 1 ? $clog2(SPACES) : 1,
    localparam int CORE_W  = CORES > 1 ? $clog2(CORES) : 1,
    localparam int AT_W    = $clog2(SPACES * 32)   // {space, row}
) (
    input  wire                clk,
    input  wire                rst,
    input  wire                bar_valid,
    input  wire  [7:0]         bar_function,
    input  wire  [11:0]        bar_offset,
    input  wire  [31:0]        bar_data,
    output logic               bar_mine,     // combinational: it is a space's, not the front's
    input  wire                reg_valid,
    output logic               reg_ready,
    input  wire                reg_write,
    input  wire  [9:0]         reg_addr,
    input  wire  [63:0]        reg_wdata,
    output logic               reg_rvalid,
    output logic [63:0]        reg_rdata,
    output logic               clear_want,
    input  wire                still,
    output logic               clear_valid,
    output logic [AT_W-1:0]    clear_at,
    // To fp_submit; answers are combinational.
    output logic [SPACES-1:0]  pending,      // there is a request at the head
    output logic [SPACES-1:0]  big,        // blocks of 4096 bytes
    input  wire  [SPACE_W-1:0] head_space,
    output logic [4:0]         head_tag,
    input  wire  [AT_W-1:0]    request_at,
    output request_t           request,
    input  wire                pop,          // head_space's head is done with
    input  wire  [SPACE_W-1:0] bell_space,
    output logic [CORE_W-1:0]  bell_core,
    output logic [LF_W-1:0]    bell_local,
    // To and from fp_complete.
    output logic               go_valid,     // accepted; a pulse
    output logic [AT_W-1:0]    go_at,
    input  wire                ended_valid,  // its record is on its way; a pulse
    input  wire  [AT_W-1:0]    ended_at,
    input  wire  [SPACE_W-1:0] ended_space,
    input  wire  [SPACE_W-1:0] ring_space,
    output logic [38:0]        ring_base,    // host address bits 47:9
    output logic [15:0]        ring_refused,
    // To fp_statistics: a row is read, `stat_done` with it.
    output logic               stat_valid,
    output logic [AT_W-1:0]    stat_at,
    input  wire                stat_done,
    input  wire  [63:0]        stat_data,
    output logic               busy
);
    localparam int ROWS = SPACES;
    if (SPACES < 1 || SPACES > 16) begin : g_spaces
        $error("fp_control: SPACES must be 1 to 16");
    end

    // ---- Spaces
    logic [SPACES-1:0] enabled;
    logic [7:0]        functions[ROWS];
    logic [CORE_W-1:0] cores[ROWS];
    logic [LF_W-1:0]   locals[ROWS];
    logic [18:0]       pages[ROWS];
    logic [38:0]       rings[ROWS];
    logic [15:0]       refused[ROWS];
    logic [5:0]        outstanding[ROWS];

    // ---- Registers
    wire [3:0]         r_number = reg_addr[9:6];
    wire [SPACE_W-1:0] r_space  = SPACE_W'(r_number);
    wire               r_exists = int'(r_number) < SPACES;
    wire               r_stat   = reg_addr[5];
    wire               r_write  = reg_valid && reg_write && r_exists && !r_stat && !reg_rvalid;
    wire               r_enable = r_write && reg_addr[4:0] == 5'd0 && reg_wdata[63];
    wire               r_read   = reg_valid && !reg_write && r_exists && r_stat && !reg_rvalid;

    // Clearing: all rows after reset, then those of a space that is enabled.
    logic all, one;
    wire  last_row = clear_at[4:0] == 5'd31 && (one || clear_at == AT_W'(SPACES * 32 - 1));
    wire  enables  = one && clear_valid && last_row;
    assign clear_want  = all || r_enable;
    assign clear_valid = (all || one) && still;
    always_ff @(posedge clk) begin
        if (clear_valid) clear_at <= clear_at + 1'b1;
        if (clear_valid && last_row) {all, one} <= '0;
        if (r_enable && !all && !one) begin
            one      <= 1'b1;
            clear_at <= AT_W'({r_space, 5'd0});
        end
        if (rst) begin
            {all, one} <= 2'b10;
            clear_at   <= '0;
        end
    end

    assign stat_valid = r_read && !all;
    assign stat_at    = AT_W'({r_space, reg_addr[4:0]});
    assign reg_ready  = reg_valid && !reg_rvalid && !all && (r_enable ? enables : !r_read || stat_done);
    always_ff @(posedge clk) begin
        reg_rvalid <= reg_ready && !rst;
        reg_rdata  <= '0;
        if (r_read) reg_rdata <= stat_data;
        else if (!reg_write && r_exists && !r_stat) begin
            if (reg_addr[4:0] == 5'd0) reg_rdata <= {enabled[r_space], 39'b0, functions[r_space], 4'b0, 4'(cores[r_space]), 8'(locals[r_space])};
            if (reg_addr[4:0] == 5'd3) reg_rdata <= {32'b0, refused[r_space], 10'b0, outstanding[r_space]};
        end
        if (reg_ready && r_write) begin
            unique case (reg_addr[4:0])
                5'd0: begin
                    enabled[r_space] <= reg_wdata[63];
                    // What was accepted before it is disabled goes on, at its place.
                    if (reg_wdata[63]) {functions[r_space], cores[r_space], locals[r_space]} <= {reg_wdata[23:16], reg_wdata[8+:CORE_W], reg_wdata[0+:LF_W]};
                end
                5'd1: {big[r_space], pages[r_space]} <= {reg_wdata[32], reg_wdata[18:0]};
                5'd2: rings[r_space] <= reg_wdata[47:9];
                default: ;
            endcase
        end
        if (rst) enabled <= '0;
    end
    assign bell_core    = cores[bell_space];
    assign bell_local   = locals[bell_space];
    assign ring_base    = rings[ring_space];
    assign ring_refused = refused[ring_space];

    // ---- A word: whose it is, which
    logic [SPACES-1:0]  match;
    wire  [SPACE_W-1:0] matched;
    always_comb begin
        for (int s = 0; s < SPACES; s++) match[s] = enabled[s] && functions[s] == bar_function;
    end
    one_of #(.N(SPACES)) whose (.bits(match), .index(matched));
    assign bar_mine = bar_offset[11] && |match;

    logic               w_valid, w_right;
    logic [SPACE_W-1:0] w_space;
    logic [1:0]         w_word;
    logic [31:0]        w_data;
    always_ff @(posedge clk) begin
        w_valid <= bar_valid && bar_mine && !rst;
        w_right <= bar_offset[10:4] == '0 && bar_offset[1:0] == '0;
        w_space <= matched;
        w_word  <= bar_offset[3:2];
        w_data  <= bar_data;
    end

    // ---- The accumulator
    logic [31:0] word_0[ROWS], word_1[ROWS], word_2[ROWS];
    logic [2:0]  have[ROWS];
    wire         keeps = w_valid && w_right && w_word != 2'd3;
    wire         goes  = w_valid && w_right && w_word == 2'd3;
    always_ff @(posedge clk) begin
        if (keeps && w_word == 2'd0) word_0[w_space] <= w_data;
        if (keeps && w_word == 2'd1) word_1[w_space] <= w_data;
        if (keeps && w_word == 2'd2) word_2[w_space] <= w_data;
        if (keeps) have[w_space] <= have[w_space] | 3'(3'd1 << w_word);
        if (goes) have[w_space] <= '0;
        if (enables) have[r_space] <= '0;
    end

    // ---- A go: what it asks for
    logic               g_valid, g_refused, g_whole, g_known, g_flush, g_moves, g_zero, g_none;
    logic [SPACE_W-1:0] g_space;
    logic [4:0]         g_tag;
    request_t           g;
    logic               g_odd;     // the buffer's offset cannot be
    wire  [7:0]         opcode = w_data[7:0];
    always_ff @(posedge clk) begin
        g_valid   <= w_valid && !keeps && !rst;
        g_refused <= !w_right || w_data[31:21] != '0;
        g_space   <= w_space;
        g_tag     <= w_data[20:16];
        g_whole   <= have[w_space] == 3'b111;
        g_known   <= opcode inside {OP_FLUSH, OP_WRITE, OP_READ, OP_COMPARE, OP_WRITE_ZEROES};
        g_flush   <= opcode == OP_FLUSH;
        g_moves   <= opcode inside {OP_WRITE, OP_READ, OP_COMPARE};
        g_zero    <= w_data[15:9] == '0;
        g_none    <= word_2[w_space][31:16] == '0;
        g_odd     <= word_0[w_space][31:30] != '0 || word_0[w_space][1:0] != '0;
        g         <= '{wrong: FP_GOOD, opcode: opcode[3:0], durable: w_data[8], offset: word_0[w_space][29:2],
                       lba: {word_2[w_space][15:0], word_1[w_space]}, blocks_z: word_2[w_space][31:16] - 16'd1};
    end

    // Its last word in the buffer, in units of 4 bytes: 128 or 1024 a block.
    logic               h_valid, h_refused, h_moves;
    logic [SPACE_W-1:0] h_space;
    logic [4:0]         h_tag;
    request_t           h;
    logic [28:0]        h_end;
    wire  [25:0]        size_z = big[g_space] ? {g.blocks_z, 10'h3ff} : {3'b0, g.blocks_z, 7'h7f};
    always_ff @(posedge clk) begin
        h_valid   <= g_valid && !rst;
        h_refused <= g_refused;
        h_space   <= g_space;
        h_tag     <= g_tag;
        h_moves   <= g_moves;
        h_end     <= {1'b0, g.offset} + {3'b0, size_z};
        h         <= g;
        if (!g_known) h.wrong <= FP_OPCODE;
        else if (!g_whole || !g_zero || (!g_flush && g_none) || (g_moves && g_odd)) h.wrong <= FP_FIELD;
    end

    // ---- In use, beyond the buffer; then it is a request
    (* ram_style = "distributed" *) logic began[SPACES * 32];
    (* ram_style = "distributed" *) logic over[SPACES * 32];
    (* ram_style = "distributed" *) logic [$bits(request_t)-1:0] requests[SPACES * 32];
    (* ram_style = "distributed" *) logic [4:0] order[SPACES * 32];
    logic [5:0] heads[ROWS], tails[ROWS];

    wire beyond = h_end[28:10] >= pages[h_space];
    wire in_use = began[go_at] != over[go_at];
    wire accept = h_valid && !h_refused && !in_use;
    wire refuse = h_valid && !accept;
    request_t new_;
    always_comb begin
        new_ = h;
        if (h.wrong == FP_GOOD && h_moves && beyond) new_.wrong = FP_TRANSFER;
    end
    assign go_valid  = accept;
    assign go_at     = AT_W'({h_space, h_tag});

    wire [AT_W-1:0] over_at    = clear_valid ? clear_at : ended_at;
    wire [AT_W-1:0] order_to   = AT_W'({h_space, tails[h_space][4:0]});
    always_ff @(posedge clk) begin
        if (accept) began[go_at] <= !over[go_at];
        if (accept) order[order_to] <= h_tag;
        if (clear_valid || ended_valid) over[over_at] <= began[over_at];
        if (accept) requests[go_at] <= new_;
    end
    assign request  = requests[request_at];
    assign head_tag = order[AT_W'({head_space, heads[head_space][4:0]})];

    always_ff @(posedge clk) begin
        for (int s = 0; s < SPACES; s++) begin
            if (accept && h_space == SPACE_W'(s)) tails[s] <= tails[s] + 6'd1;
            if (pop && head_space == SPACE_W'(s)) heads[s] <= heads[s] + 6'd1;
            if (refuse && h_space == SPACE_W'(s)) refused[s] <= refused[s] + 16'd1;
            outstanding[s] <= outstanding[s] + 6'(accept && h_space == SPACE_W'(s)) - 6'(ended_valid && ended_space == SPACE_W'(s));
            if (rst || (enables && r_space == SPACE_W'(s))) {tails[s], heads[s], refused[s], outstanding[s]} <= '0;
        end
    end
    always_comb begin
        for (int s = 0; s < SPACES; s++) pending[s] = tails[s] != heads[s];
    end
    assign busy = all || w_valid || g_valid || h_valid || |pending || reg_valid || reg_rvalid;

    wire unused = &{1'b0, reg_wdata, h_end[9:0]};

`ifndef SYNTHESIS
    always_ff @(posedge clk) begin
        if (!rst) begin
            for (int s = 0; s < SPACES; s++) assert (6'(tails[s] - heads[s]) <= 6'd32) else $fatal(1, "fp_control: space %0d: more requests than tags", s);
            assert (!ended_valid || began[ended_at] != over[ended_at]) else $fatal(1, "fp_control: request %0d ends twice", ended_at);
            assert (!pop || pending[head_space]) else $fatal(1, "fp_control: nothing to take of space %0d", head_space);
        end
    end
`endif
endmodule
`default_nettype wire
