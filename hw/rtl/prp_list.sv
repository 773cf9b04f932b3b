// PRP lists: the guest's is fetched, its entries become host addresses in a list of the core's own, which the disk is told of.
//
//   translate ──job_*──► jobs (per slot: where the list is, how many entries)
//                          │
//   functions ──p_*──► no list, or ended ──────────────────────────────────────────────► o_* ──► submit
//                  └─► waiting ──► fetch ──hrd_*──► host                                  ▲
//                       (16)        ▲  │   ◄─hrr_*─── buffers (AHEAD of 16 beats)         │
//                                   │  │                        │ in order                │
//                                   └──┼── next part ◄── work ◄─┘                         │
//                                      └─► page_table ◄──┴──► ssd_memory: entry, entry, … word 4 ─┘
//
// Fetches run ahead, AHEAD of them; the lists are worked through in order, and who has none overtakes. A part ends with its page, where the
// last entry leads to the next list if more than one is left (Base 4.3.1), or after 16 beats. What is kept of an entry is what counts:
// page and offset within 2 MiB, whether its offset within 4 KiB is zero, whether it lies above the table.
// Statuses as the software's, in the order of the entries: PRP Offset Invalid (an entry, or where a list leads to, within a page), Data Transfer
// Error (not there, not to be written, not to be read by the host).
// A list's memory belongs to the slot until `free_*`.
// Invariants: at most LISTS lists; a buffer is fetched into only when nobody works on it; words of one slot are complete before `o_*`.
// Cycles: 1 without a list; with one, the fetch and 2 an entry.
`default_nettype none

module prp_list
    import millrace_pkg::*;
#(
    parameter int          PAGES     = 512,
    parameter int          LISTS     = 16,
    parameter int          AHEAD     = 4,    // lists fetched ahead, a power of two
    parameter int          SSDS      = 16,
    parameter int          CORE      = 0,
    parameter logic [63:0] CHIP_BASE = 64'h0,
    localparam int         PAGE_W    = $clog2(PAGES),
    localparam int         LIST_W    = PAGE_W + 18
) (
    input  wire logic              clk,
    input  wire logic              rst,

    input  wire logic              job_en,
    input  wire logic [SLOT_W-1:0] job_slot,
    input  wire logic [5:0]        job_entries,
    input  wire logic              job_to_guest,
    input  wire logic              job_high,
    input  wire logic [LIST_W-1:0] job_list,      // guest address bits PAGE_W+20:3

    input  wire logic              p_valid,
    output      logic              p_ready,
    input  wire passed_t           p,
    output      logic              o_valid,
    input  wire logic              o_ready,
    output      passed_t           o,

    // page_table; its answer is there in the cycle after a look-up was taken.
    output      logic              look_valid,
    input  wire logic              look_ready,
    output      logic [LF_W-1:0]   look_lf,
    output      logic [PAGE_W-1:0] look_page,
    output      logic              look_high,
    input  wire logic              look_present,
    input  wire logic              look_writable,
    input  wire logic [26:0]       look_frame,

    // ssd_memory.
    output      logic              l_valid,
    input  wire logic              l_ready,
    output      logic              l_high,
    output      logic [8:0]        l_addr,
    output      logic [63:0]       l_data,

    output      logic              hrd_valid,
    input  wire logic              hrd_ready,
    output      logic [63:0]       hrd_addr,
    output      logic [4:0]        hrd_beats,
    output      logic [7:0]        hrd_tag,
    input  wire logic              hrr_valid,
    input  wire logic [7:0]        hrr_tag,
    input  wire logic [127:0]      hrr_data,
    input  wire logic              hrr_last,
    input  wire logic              hrr_error,

    input  wire logic              free_valid,
    input  wire logic [SLOT_W-1:0] free_slot
);
    localparam int B_W = AHEAD > 1 ? $clog2(AHEAD) : 1;
    if (LISTS < 1 || LISTS > 16) begin : g_lists
        $error("prp_list: LISTS must be 1 to 16");
    end
    if (AHEAD < 2 || AHEAD > 16 || (1 << B_W) != AHEAD) begin : g_ahead
        $error("prp_list: AHEAD must be 2, 4, 8 or 16");
    end

    typedef struct packed {
        logic [5:0]        entries;
        logic              to_guest;
        logic              high;
        logic [LIST_W-1:0] list;
    } job_t;
    typedef struct packed {
        logic [SLOT_W-1:0]  slot;
        logic [QUEUE_W-1:0] owner;
        logic [SSDS-1:0]    ssds;
    } waiting_t;
    // What is kept of an entry of a guest's list.
    typedef struct packed {
        logic              inner;    // within a page: its offset is not zero
        logic              high;     // above the table
        logic [PAGE_W+8:0] page;     // guest address bits PAGE_W+20:12
    } entry_t;

    // ---- In: who has a list waits, others pass
    (* ram_style = "distributed" *) logic [$bits(job_t)-1:0] jobs[64];
    (* ram_style = "distributed" *) logic                    listed[64];
    always_ff @(posedge clk) begin
        if (job_en) begin
            jobs[job_slot]   <= {job_entries, job_to_guest, job_high, job_list};
            listed[job_slot] <= job_entries != '0;
        end
    end
    wire       has     = !p.ended && listed[p.slot];
    wire       ended_v;   // `work` offers what it is done with
    wire       o_load  = !o_valid || o_ready;
    logic      waits_ready;
    assign p_ready = has ? waits_ready : o_load && !ended_v;

    waiting_t first;
    logic     first_valid;
    logic     first_take;
    logic [4:0] waiting_count;
    wire waiting_t came = '{slot: p.slot, owner: p.queue, ssds: p.ssds[SSDS-1:0]};
    fifo #(.WIDTH($bits(waiting_t)), .DEPTH(16)) waiting (
        .clk, .rst, .in_valid(p_valid && has), .in_ready(waits_ready), .in_data(came),
        .out_valid(first_valid), .out_ready(first_take), .out_data(first), .count(waiting_count)
    );

    // ---- Buffers: used from `work_b` on, in order
    logic [AHEAD-1:0] full;      // all has come
    logic [AHEAD-1:0] failed;
    logic [B_W-1:0]   fetch_b;
    logic [B_W-1:0]   work_b;
    logic [B_W:0]     used;
    (* ram_style = "distributed" *) logic [$bits(waiting_t)-1:0] whose[AHEAD];
    (* ram_style = "distributed" *) logic [$bits(entry_t)-1:0] even[AHEAD * 16];
    (* ram_style = "distributed" *) logic [$bits(entry_t)-1:0] odd[AHEAD * 16];
    logic [AHEAD-1:0][3:0] beat;

    function automatic entry_t kept(input logic [63:0] entry);
        return '{inner: entry[11:0] != '0, high: entry[63:PAGE_W+21] != '0, page: entry[PAGE_W+20:12]};
    endfunction
    wire           come   = hrr_valid && hrr_tag[7:4] == 4'h8;
    wire [B_W-1:0] come_b = hrr_tag[B_W-1:0];
    always_ff @(posedge clk) begin
        if (come) even[{come_b, beat[come_b]}] <= kept(hrr_data[63:0]);
    end
    always_ff @(posedge clk) begin
        if (come) odd[{come_b, beat[come_b]}] <= kept(hrr_data[127:64]);
    end

    // ---- Fetch: a part of a list
    typedef enum logic [1:0] {F_IDLE, F_LOOK, F_GOT, F_ASK} fetch_t;
    fetch_t            fetch;
    logic              again;      // `work` wants the next part of its list
    logic              again_take;
    logic [B_W-1:0]    f_b;
    logic [LF_W-1:0]   f_lf;
    logic              f_high;
    logic [LIST_W-1:0] f_at;
    logic [5:0]        f_left;
    logic [26:0]       f_frame;
    wire               f_look = fetch == F_LOOK;
    assign again_take = fetch == F_IDLE && again;
    assign first_take = fetch == F_IDLE && !again && first_valid && !used[B_W];

    // The jobs' memory has one port for reading: who starts to fetch comes before who starts to work.
    wire waiting_t     w_next = whose[work_b];
    wire job_t         job    = jobs[first_take ? first.slot : w_next.slot];

    waiting_t          w;          // whose list is worked on
    logic              w_to_guest;
    logic [LIST_W-1:0] w_at;       // next entry
    logic              w_high;
    logic [5:0]        w_left;

    always_ff @(posedge clk) begin
        if (rst) fetch <= F_IDLE;
        else begin
            unique case (fetch)
                F_IDLE: if (again_take || first_take) fetch <= F_LOOK;
                F_LOOK: if (look_ready) fetch <= F_GOT;
                F_GOT: fetch <= look_present ? F_ASK : F_IDLE;
                default: if (hrd_ready) fetch <= F_IDLE;
            endcase
        end
    end
    always_ff @(posedge clk) begin
        if (first_take) whose[fetch_b] <= first;
    end
    always_ff @(posedge clk) begin
        if (fetch == F_IDLE) begin
            f_b    <= again ? work_b : fetch_b;
            f_lf   <= again ? w.owner[QUEUE_W-1 -: LF_W] : first.owner[QUEUE_W-1 -: LF_W];
            f_high <= again ? w_high : job.high;
            f_at   <= again ? w_at : job.list;
            f_left <= again ? w_left : job.entries;
        end
        if (fetch == F_GOT) f_frame <= look_frame;
    end
    always_ff @(posedge clk) begin
        if (come) begin
            beat[come_b] <= beat[come_b] + 4'd1;
            if (hrr_last) full[come_b] <= 1'b1;
            if (hrr_error) failed[come_b] <= 1'b1;
        end
        if (fetch == F_LOOK) begin
            beat[f_b]   <= '0;
            full[f_b]   <= 1'b0;
            failed[f_b] <= 1'b0;
        end
        if (fetch == F_GOT && !look_present) begin
            full[f_b]   <= 1'b1;
            failed[f_b] <= 1'b1;
        end
        if (first_take) full[fetch_b] <= 1'b0;
        if (again_take) full[work_b] <= 1'b0;
    end

    // Beats: as many as the entries that are left take, as the page has, or 16.
    logic [4:0] wanted, most;
    wire [8:0] room   = 9'd256 - {1'b0, f_at[8:1]};
    always_ff @(posedge clk) begin
        wanted <= 5'((7'(f_left) + 7'(f_at[0]) + 7'd1) >> 1);
        most   <= room < 9'd16 ? room[4:0] : 5'd16;
    end
    assign hrd_valid = fetch == F_ASK;
    assign hrd_addr  = {16'b0, f_frame, f_at[17:1], 4'b0};
    always_ff @(posedge clk) hrd_beats <= wanted < most ? wanted : most; // of what stands there since the look-up
    assign hrd_tag   = {4'h8, 4'(f_b)};

    // ---- Lists that are free: those that were never used, then those that came back
    logic       list_free;
    logic [3:0] list_back;
    logic       list_back_valid;
    logic       list_room;
    logic [4:0] list_count;
    logic [4:0] born;
    logic       list_take;
    wire        fresh = int'(born) < LISTS;
    wire [3:0]  next_list = fresh ? born[3:0] : list_back;
    assign list_free = fresh || list_back_valid;

    (* ram_style = "distributed" *) logic [4:0] lists[64]; // of a slot: has one, which
    logic [3:0] w_list;
    wire        passes = p_valid && !has;
    always_ff @(posedge clk) begin
        if (o_load && (ended_v || passes)) lists[ended_v ? w.slot : p.slot] <= {ended_v, w_list};
    end
    wire [4:0] back = lists[free_slot];
    fifo #(.WIDTH(4), .DEPTH(16)) free_lists (
        .clk, .rst, .in_valid(free_valid && back[4]), .in_ready(list_room), .in_data(back[3:0]),
        .out_valid(list_back_valid), .out_ready(list_take && !fresh), .out_data(list_back), .count(list_count)
    );
    always_ff @(posedge clk) begin
        if (rst) born <= '0;
        else if (list_take && fresh) born <= born + 5'd1;
    end

    // ---- Work: entry by entry
    typedef enum logic [2:0] {W_IDLE, W_RUN, W_AGAIN, W_WAIT, W_LAST, W_POINT, W_OUT} work_t;
    work_t      work;
    logic [4:0] pos;         // next entry in the buffer
    logic [4:0] index;       // and in our list
    logic       looked;      // its page is there now
    logic       pending;     // an entry is to be written
    logic [8:0] e_page;      // of the entry looked up, or to be written: address bits 20:12
    logic [4:0] e_index;
    logic [26:0] e_frame;
    status_t    w_status;
    logic       w_bad;

    wire entry_t entry   = pos[0] ? odd[{work_b, pos[4:1]}] : even[{work_b, pos[4:1]}];
    wire         pointer = w_at[8:0] == 9'h1ff && w_left > 6'd1;
    wire         may     = work == W_RUN && !looked && (!pending || l_ready);
    wire         w_look  = may && !pointer && !entry.inner;
    wire         w_go    = w_look && look_ready && !f_look;
    wire         good    = look_present && (look_writable || !w_to_guest);
    assign list_take = work == W_IDLE && used != '0 && full[work_b] && list_free && !first_take;
    assign again     = work == W_AGAIN && !looked;
    assign ended_v   = work == W_OUT;

    assign look_valid = f_look || w_look;
    assign look_lf    = f_look ? f_lf : w.owner[QUEUE_W-1 -: LF_W];
    assign look_page  = f_look ? f_at[LIST_W-1:18] : entry.page[PAGE_W+8:9];
    assign look_high  = f_look ? f_high : entry.high;

    always_ff @(posedge clk) begin
        if (rst) begin
            work    <= W_IDLE;
            looked  <= 1'b0;
            pending <= 1'b0;
        end else begin
            looked <= w_go;
            if (looked && good) pending <= 1'b1;
            else if (l_ready) pending <= 1'b0;
            unique case (work)
                W_IDLE: if (list_take) work <= failed[work_b] ? W_OUT : W_RUN;
                W_RUN: begin
                    if (may && entry.inner) work <= W_OUT;
                    else if (may && pointer) work <= W_AGAIN;
                    else if (w_go && w_left == 6'd1) work <= W_LAST;
                    else if (w_go && pos == 5'd31) work <= W_AGAIN;
                end
                W_AGAIN: if (again_take) work <= W_WAIT;
                W_WAIT: if (full[work_b]) work <= failed[work_b] ? W_OUT : W_RUN;
                W_LAST: if (!looked && !pending) work <= W_POINT;
                W_POINT: if (l_ready) work <= W_OUT;
                default: if (o_load) work <= W_IDLE;
            endcase
            if (looked && !good) work <= W_OUT;
        end
    end
    always_ff @(posedge clk) begin
        if (work == W_IDLE) begin
            w          <= w_next;
            w_to_guest <= job.to_guest;
            w_list     <= next_list;
            index      <= '0;
            w_bad      <= failed[work_b];
            w_status   <= ST_DATA_TRANSFER_ERROR;
        end
        if (work == W_WAIT) w_bad <= failed[work_b];
        if (may && entry.inner) begin
            w_bad    <= 1'b1;
            w_status <= ST_PRP_OFFSET_INVALID;
        end
        if (looked && !good) w_bad <= 1'b1;
        if (w_go) begin
            index   <= index + 5'd1;
            e_index <= index;
            e_page  <= entry.page[8:0];
        end
        if (looked) e_frame <= look_frame;
    end
    always_ff @(posedge clk) begin
        if (work == W_IDLE) begin
            w_at   <= job.list;
            w_high <= job.high;
            w_left <= job.entries;
            pos    <= {4'b0, job.list[0]};
        end else if (may && pointer) begin
            w_at   <= {entry.page, 9'b0};
            w_high <= entry.high;
        end else if (w_go) begin
            w_at[8:0] <= w_at[8:0] + 9'd1; // the last of a page is followed by nothing, or by another list
            w_left <= w_left - 6'd1;
            pos    <= pos + 5'd1;
        end
        if (work == W_WAIT) pos <= {4'b0, w_at[0]};
    end

    assign l_valid = pending || work == W_POINT;
    assign l_high  = pending && e_index[0];
    assign l_addr  = pending ? {1'b1, w_list, e_index[4:1]} : {1'b0, w.slot, 2'd2};
    assign l_data  = pending ? {16'b0, e_frame, e_page, 12'b0} : CHIP_BASE + {46'b0, 4'(CORE), 2'b01, w_list, 8'b0};

    // ---- Buffers' and lists' coming and going, out
    wire leave = ended_v && o_load;
    always_ff @(posedge clk) begin
        if (rst) begin
            fetch_b <= '0;
            work_b  <= '0;
            used    <= '0;
            o_valid <= 1'b0;
        end else begin
            if (first_take) fetch_b <= fetch_b + 1'b1;
            if (leave) work_b <= work_b + 1'b1;
            if (first_take && !leave) used <= used + 1'b1;
            if (leave && !first_take) used <= used - 1'b1;
            if (o_load) o_valid <= ended_v || passes;
        end
    end
    always_ff @(posedge clk) begin
        if (o_load) begin
            if (ended_v) o <= '{slot: w.slot, queue: w.owner, ssds: SSD_MAX'(w.ssds), ended: w_bad, late: 1'b0, status: w_bad ? w_status : ST_SUCCESS};
            else o <= p;
        end
    end

    wire unused = &{1'b0, waiting_count, list_count, list_room, hrr_tag[3:0], p.ssds};

`ifndef SYNTHESIS
    always_ff @(posedge clk) begin
        if (!rst) begin
            assert (int'(list_count) <= LISTS && !(free_valid && back[4] && !list_room)) else $fatal(1, "prp_list: more lists than there are");
            if (come) assert (int'(hrr_tag[3:0]) < AHEAD && !full[come_b]) else $fatal(1, "prp_list: tag %h was not asked for", hrr_tag);
            assert (!(ended_v && (looked || pending))) else $fatal(1, "prp_list: slot %0d leaves before its list is written", w.slot);
        end
    end
`endif
endmodule

`default_nettype wire
