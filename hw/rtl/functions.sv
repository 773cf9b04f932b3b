// The storage functions' place: whom a command belongs to, what it has used, what becomes of it.
//
//   translate ──info_*──► table per slot: SLBA, NLB, NSID, opcode ──┐
//   registers 3000h ──cfg_*──► configuration per local function ────┼──► fn_chain ──► verdict
//                              state per local function ◄───────────┴──► (generated from crates/functions)
//                                                                          │ pass, fan out: LBA ──f_*──► ssd_memory
//   translate ──p_*──┬─► ask ───────────────────────────────────────────►──┤
//                    │    ▲                                                └──► o_* ──► prp_list
//                    └─► ring of those that are held ◄── hold: until when
//
// One command at a time is asked, so none sees a state that another one is about to change. Who is held goes into a ring as long as there
// are slots, and so does everybody of his function who comes after him. When a function's time has come the ring is turned once, and each
// whose time has come is asked again, unless one of his function before him stays. So commands of a function keep their order, and
// no function waits for another's time; but who is held keeps his slot, and slots are common to all functions of the core.
// A command that is to end late (`late`) is asked for the functions' refusals only, and never held.
// Invariants: the state after reset, and after configuration word 0 is written with bit 40 clear (the function is off), is zero, and no
// other write changes it; configurations do not change while one is asked; `blocked` has every function that has somebody in the ring.
// Cycles: the chain's latency and 1; a turn of the ring takes one per place and four, with others between. When the way out is not free at the answer, the same is asked
// once more.
`default_nettype none

module functions
    import millrace_pkg::*;
#(
    parameter int LF   = 16,
    parameter int SSDS = 16
) (
    input  wire logic              clk,
    input  wire logic              rst,
    input  wire logic [31:0]       now,

    input  wire logic              cfg_wr_en,
    output      logic              cfg_wr_ready,
    input  wire logic [11:0]       cfg_wr_addr,
    input  wire logic [63:0]       cfg_wr_data,

    input  wire logic              info_en,
    input  wire logic [SLOT_W-1:0] info_slot,
    input  wire logic [63:0]       info_slba,
    input  wire logic [31:0]       info_nsid,
    input  wire logic [15:0]       info_nlb_z,
    input  wire logic [7:0]        info_opcode,

    input  wire logic              p_valid,
    output      logic              p_ready,
    input  wire passed_t           p,
    output      logic              o_valid,
    input  wire logic              o_ready,
    output      passed_t           o,

    // ssd_memory: word 5 of the entry.
    output      logic              f_valid,
    input  wire logic              f_ready,
    output      logic [SLOT_W+1:0] f_addr,
    output      logic [63:0]       f_data
);
    localparam int LFI_W  = LF > 1 ? $clog2(LF) : 1;
    localparam int TIME_W = 20; // of a hold's end; who is asked too early is held again
    if (LF < 1 || LF > 16 || (LF & (LF - 1)) != 0) begin : g_lf
        $error("functions: LF must be a power of two up to 16");
    end

    typedef enum logic [1:0] {TAKE, READY, ASK} state_t;
    state_t  state;
    passed_t cur;               // who is asked
    wire [LFI_W-1:0] lf = cur.queue[2 +: LFI_W];

    // ---- What the chain is given
    // A block's number above 48 bits is out of every range: one bit tells it.
    (* ram_style = "distributed" *) logic [100:0] infos[64];
    logic [48:0] c_slba;
    logic [31:0] c_nsid;
    logic [15:0] c_nlb_z;
    logic [3:0]  c_opcode;
    always_ff @(posedge clk) begin
        if (info_en) infos[info_slot] <= {info_slba[63:48] != '0, info_slba[47:0], info_nsid, info_nlb_z, info_opcode[3:0]};
    end
    assign {c_slba, c_nsid, c_nlb_z, c_opcode} = infos[cur.slot];

    logic [LFI_W:0] clear;      // after reset every state becomes zero, one a cycle
    wire            clearing = !clear[LFI_W];
    always_ff @(posedge clk) begin
        if (rst) clear <= '0;
        else if (clearing) clear <= clear + 1'b1;
    end
    assign cfg_wr_ready = state == TAKE && !clearing;
    wire cfg_write  = cfg_wr_en && cfg_wr_ready;
    wire name_write = cfg_write && cfg_wr_addr[3:0] == 4'd0;
    wire wipe       = name_write && !cfg_wr_data[40];
    // Of each word as many bits are kept as the chain looks at, and of the disks' mask those that there are.
    wire [LFI_W-1:0] cfg_lf = LFI_W'(cfg_wr_addr[11:4]);
    (* ram_style = "distributed" *) logic [37+SSDS:0] namespaces[1 << LFI_W];
    (* ram_style = "distributed" *) logic [47:0] blocks[1 << LFI_W];
    (* ram_style = "distributed" *) logic [47:0] shares[1 << LFI_W];
    (* ram_style = "distributed" *) logic [63:0] iops[1 << LFI_W];
    (* ram_style = "distributed" *) logic [55:0] bytes[1 << LFI_W];
    always_ff @(posedge clk) begin
        if (name_write)
            namespaces[cfg_lf] <= {cfg_wr_data[48 +: SSDS], cfg_wr_data[44:40], cfg_wr_data[34], cfg_wr_data[31:0]};
    end
    always_ff @(posedge clk) begin
        if (cfg_write && cfg_wr_addr[3:0] == 4'd1) blocks[cfg_lf] <= cfg_wr_data[47:0];
    end
    always_ff @(posedge clk) begin
        if (cfg_write && cfg_wr_addr[3:0] == 4'd2) shares[cfg_lf] <= cfg_wr_data[47:0];
    end
    always_ff @(posedge clk) begin
        if (cfg_write && cfg_wr_addr[3:0] == 4'd3) iops[cfg_lf] <= cfg_wr_data;
    end
    always_ff @(posedge clk) begin
        if (cfg_write && cfg_wr_addr[3:0] == 4'd4) bytes[cfg_lf] <= {cfg_wr_data[63:32], cfg_wr_data[23:0]};
    end
    wire [37+SSDS:0] name = namespaces[lf];
    wire [55:0]      byte_cap = bytes[lf];

    // Of a state's words are kept: both buckets, and of the disk whose turn was last as many bits as there are disks. No disk is
    // ever marked as failed here (bits 63:48 of the first word).
    (* ram_style = "distributed" *) logic [87+SSDS:0] states[1 << LFI_W];

    logic        v_valid;
    logic [7:0]  v_kind;
    logic [63:0] v_lba;
    logic [15:0] v_disks;
    logic [31:0] v_until;
    logic [15:0] v_status;
    logic [127:0] v_state;
    logic [LF-1:0] wiped;       // the function's state is zero: nobody of it has to wait
    logic [31:0] asked_at;
    logic        full;          // `o` has a command that has not gone
    wire         ask    = state == READY;
    wire [87+SSDS:0] st_now = states[lf];
    fn_chain chain (
        .clk, .rst, .in_valid(ask), .in_command_slba({15'b0, c_slba}), .in_command_nsid(c_nsid), .in_command_now(asked_at),
        .in_command_nlb_z(c_nlb_z), .in_command_opcode({4'b0, c_opcode}), .in_state_a({20'b0, st_now[43:0]}), .in_state_b({16'(st_now[88 +: SSDS]), 4'b0, st_now[87:44]}),
        .in_config_namespace({16'(name[38 +: SSDS]), 3'b0, name[37:33], 5'b0, name[32], 2'b0, name[31:0]}),
        .in_config_blocks({16'b0, blocks[lf]}), .in_config_share({16'b0, shares[lf]}),
        .in_config_iops(iops[lf]), .in_config_bytes({byte_cap[55:24], 8'b0, byte_cap[23:0]}),
        .out_valid(v_valid), .out_verdict_kind(v_kind), .out_verdict_lba(v_lba), .out_verdict_disks(v_disks),
        .out_verdict_until(v_until), .out_verdict_status(v_status), .out_state_a(v_state[63:0]), .out_state_b(v_state[127:64])
    );
    localparam logic [7:0] HOLD = 8'd2, REJECT = 8'd3;
    wire wait_out = full;       // also when it goes just now: whether it does is known late in the cycle
    wire answer = state == ASK && v_valid && !wait_out; // else it is asked again: nothing has changed
    wire hold   = answer && v_kind == HOLD && !cur.late;
    wire reject = answer && v_kind == REJECT;
    wire go     = answer && !reject && !hold && !cur.late;
    always_ff @(posedge clk) begin
        if (go || wipe || clearing) begin
            states[go ? lf : wipe ? cfg_lf : clear[LFI_W-1:0]] <= go ? {v_state[112 +: SSDS], v_state[107:64], v_state[43:0]} : '0;
        end
    end

    // ---- Those that are held
    (* ram_style = "distributed" *) logic [SLOT_W+QUEUE_W-1:0] ring[64];
    (* ram_style = "distributed" *) logic [TIME_W-1:0] held_to[1 << LFI_W];
    // In a turn of the ring, who comes out goes through `next` to `h`, and by then it is known whether his time has come. Otherwise
    // the same is found out about the function at `scan`, a cycle after it moved on.
    logic [SLOT_W+QUEUE_W-1:0] next;
    logic                next_valid;
    logic                h_valid;
    logic                come;
    logic                scanned;
    logic                due_before;
    logic                none_left;    // of this turn
    wire                 take_r;
    logic [SLOT_W-1:0]   ring_head;
    logic [SLOT_W-1:0]   ring_tail;
    logic [SLOT_W:0]     ring_count;
    logic [SLOT_W:0]     ring_left;    // of this turn, still in the ring
    logic                turning;
    logic                turned;       // has just ended: who waited for that comes before the next turn
    logic [LFI_W-1:0]    scan;         // looks for a function whose time has come
    logic                ring_first;   // the ring's turn before the next that comes
    logic [LF-1:0]       blocked;
    logic [LF-1:0]       seen;         // stays in the ring after this turn
    logic [SLOT_W-1:0]   h_slot;
    logic [QUEUE_W-1:0]  h_queue;
    wire [LFI_W-1:0]  h_lf   = h_queue[2 +: LFI_W];
    wire [LFI_W-1:0]  t_lf   = turning ? next[2 +: LFI_W] : scan;
    wire [TIME_W-1:0] t_wait = now[TIME_W-1:0] - held_to[t_lf];
    wire              h_due  = come && !seen[h_lf];
    wire              s_due  = scanned && come && blocked[scan];
    wire              due    = !turning && due_before;
    wire              scans  = !turning && scanned && !s_due && !due;
    wire              h_free = !h_valid || take_r;
    wire              pop    = turning && ring_left != '0 && (!next_valid || h_free);
    always_ff @(posedge clk) begin
        if (!next_valid || h_free) {next, next_valid} <= {ring[ring_head], pop};
        if (h_free) {h_slot, h_queue, h_valid} <= {next, next_valid};
        if (!turning || h_free) come <= wiped[t_lf] || !t_wait[TIME_W-1];
        scanned    <= !turning && !scans;
        due_before <= !turning && s_due;
        none_left  <= turning && ring_left == '0 && !next_valid && !h_valid;
        if (rst) {next_valid, h_valid} <= '0;
    end

    // ---- Whose turn it is
    wire     turn_over = state == TAKE && turning && none_left;
    // Who comes is kept for two cycles at least: in the second it is known whether others of his function wait.
    passed_t q;
    logic    q_valid;
    logic    q_known;
    logic    q_blocked;
    logic    unblocked;         // `blocked` has just changed
    wire     take_p;
    assign p_ready = !q_valid && !clearing;
    always_ff @(posedge clk) begin
        if (p_ready) q <= p;
        q_valid   <= q_valid ? !take_p : p_valid && p_ready;
        q_known   <= q_valid && !take_p;
        q_blocked <= blocked[q.queue[2 +: LFI_W]];
        unblocked <= hold || turn_over;
        if (rst) q_valid <= 1'b0;
    end
    wire  q_ready  = q_valid && q_known && !unblocked;
    wire  p_blocks = !q.ended && !q.late && q_blocked;
    logic pushed, popped;       // into the ring, out of it: counted a cycle later
    wire  start    = state == TAKE && due && !turned && !pushed; // a turn begins
    wire  p_can    = q_ready && (p_blocks ? !turning && !start : !q.ended || !wait_out);
    assign take_r  = state == TAKE && h_valid && (ring_first || !p_can);
    // The next one may follow at once, unless this one stays: then it may be the next one's predecessor.
    wire  follows  = answer && !hold && q_ready && !q.ended && !p_blocks && !turning && !due && !cfg_wr_en;
    assign take_p  = (state == TAKE && p_can && !take_r) || follows;
    wire  ask_p    = take_p && !q.ended && !p_blocks;
    wire  ask_r    = take_r && h_due;
    wire  push     = hold || (take_p && p_blocks) || (take_r && !h_due);

    always_ff @(posedge clk) begin
        if (push) ring[ring_tail] <= hold ? {cur.slot, cur.queue} : take_p ? {q.slot, q.queue} : {h_slot, h_queue};
    end
    always_ff @(posedge clk) begin
        if (hold) held_to[lf] <= v_until[TIME_W-1:0];
    end

    always_ff @(posedge clk) begin
        if (rst) begin
            ring_head  <= '0;
            ring_tail  <= '0;
            ring_count <= '0;
            pushed     <= 1'b0;
            popped     <= 1'b0;
            turning    <= 1'b0;
            turned     <= 1'b0;
            scan       <= '0;
            blocked    <= '0;
            seen       <= '0;
        end else begin
            if (push) ring_tail <= ring_tail + 1'b1;
            if (pop) ring_head <= ring_head + 1'b1;
            pushed     <= push;
            popped     <= take_r;
            ring_count <= ring_count + 7'(pushed) - 7'(popped);
            if (pop) ring_left <= ring_left - 1'b1;
            ring_first <= take_p;
            if (scans) scan <= scan + 1'b1;
            if (state == TAKE && !turning) turned <= 1'b0;
            if (start) begin
                turning   <= 1'b1;
                ring_left <= ring_count;
            end
            if (take_r && !h_due) seen[h_lf] <= 1'b1;
            if (hold) begin
                blocked[lf] <= 1'b1;
                seen[lf]    <= turning;
            end
            if (turn_over) begin
                turning <= 1'b0;
                turned  <= 1'b1;
                blocked <= seen;
                seen    <= '0;
            end
        end
    end

    // ---- Asking
    always_ff @(posedge clk) begin
        if (rst) begin
            state <= TAKE;
        end else begin
            unique case (state)
                TAKE: if (ask_p || ask_r) state <= READY;
                READY: state <= ASK;
                default: if (v_valid) state <= !answer || ask_p ? READY : TAKE;
            endcase
        end
    end
    always_ff @(posedge clk) begin
        if (state == TAKE || ask_p) begin
            cur <= take_r ? '{slot: h_slot, queue: h_queue, ssds: '0, ended: 1'b0, late: 1'b0, status: ST_SUCCESS} : q;
        end
        if (state != READY && state != ASK || v_valid) asked_at <= now;
        if (go) wiped[lf] <= 1'b0;
        if (wipe) wiped[cfg_lf] <= 1'b1;
        if (rst) wiped <= '1;
    end

    // ---- Out
    assign o_valid = full && !f_valid;
    assign f_addr  = {o.slot, 2'd2};
    always_ff @(posedge clk) begin
        if (rst) begin
            full    <= 1'b0;
            f_valid <= 1'b0;
        end else begin
            if ((answer && !hold) || (take_p && q.ended)) full <= 1'b1;
            else if (o_valid && o_ready) full <= 1'b0;
            if (go) f_valid <= 1'b1;
            else if (f_ready) f_valid <= 1'b0;
        end
    end
    always_ff @(posedge clk) begin
        if (go) f_data <= v_lba;
        if (answer && !hold) begin
            o        <= cur;
            o.ssds   <= v_disks;
            o.ended  <= reject || cur.late;
            o.late   <= 1'b0;
            if (reject) o.status <= v_status[14:0];
        end else if (take_p && q.ended) begin
            o <= q;
        end
    end

    wire unused = &{1'b0, cfg_wr_addr, info_opcode, v_kind, v_until, v_status, v_state, q.ssds};

`ifndef SYNTHESIS
    always_ff @(posedge clk) begin
        if (!rst) begin
            assert (ring_count <= 7'd64) else $fatal(1, "functions: more are held than there are slots");
            assert (!(v_valid && state != ASK)) else $fatal(1, "functions: the chain answers without being asked");
        end
    end
`endif
endmodule

`default_nettype wire
