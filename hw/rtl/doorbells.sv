// Tails, heads and sizes of a core's queues, and who is served next.
//
//     front ── db_* ──► check ──► tails, CQ heads ──┐
//     regs  ── qc_*, fc_* ──► sizes, weights ───────┤
//                                     arbiter ◄─────┘ ◄── posted_* (completion: CQ tails)
//                                        │            ◄── bad_*    (sq_fetch: a read failed)
//                                        └── pick_* ──► sq_fetch
//
// A doorbell is checked the cycle after it comes; it is never refused. The arbiter goes round the local functions; a function has
// its weight of commands a turn, its queues after one another. A pick is up to four entries of one queue, not across the ring's
// end, and takes 4 cycles. Invariants: a pick's places in the completion queue are reserved before it is offered (so a CQ is never
// overrun); a queue disabled or stopped is not picked; `qc_wr_ready` is given only between picks, so what a register says of a
// queue is never about to change by a pick under way.
`default_nettype none

module doorbells
    import millrace_pkg::*;
(
    input  wire logic               clk,
    input  wire logic               rst,

    // Doorbells (front).
    input  wire logic               db_valid,
    input  wire logic [QUEUE_W-1:0] db_queue,
    input  wire logic               db_cq,
    input  wire logic [15:0]        db_value,
    output      logic               fault_valid,  // a pulse
    output      logic [QUEUE_W-1:0] fault_queue,
    output      logic [1:0]         fault_code,   // 1 SQ tail, 2 CQ head, 3 an SQ could not be read

    // Registers 1000h + 4q + word. A write is offered by `qc_wr_valid` and carried out, in every module that has a `qc_wr_en`, in
    // the cycle of `qc_wr_en`: offered, and all of `qc_wr_ready` (doorbells, completion, interrupts) high.
    input  wire logic               qc_wr_valid,
    output      logic               qc_wr_ready,
    input  wire logic               qc_wr_en,
    input  wire logic [QUEUE_W+1:0] qc_wr_addr,
    input  wire logic [63:0]        qc_wr_data,
    // Word 3, the only one that is read: `qc_rd_valid` held until `qc_rd_ready`, data in that cycle.
    input  wire logic               qc_rd_valid,
    output      logic               qc_rd_ready,
    input  wire logic [QUEUE_W-1:0] qc_rd_queue,
    output      logic [63:0]        qc_rd_data,
    // Registers 2000h + 8f + word: word 1, the weight. Carried out in the cycle of `fc_wr_en`.
    input  wire logic               fc_wr_en,
    input  wire logic [LF_W+2:0]    fc_wr_addr,
    input  wire logic [63:0]        fc_wr_data,

    // To sq_fetch: read `count` (1 to 4) entries of a queue from `index`; `wrap`: the last of them is the ring's last.
    input  wire logic [2:0]         room,         // entries that sq_fetch has room for, at most 4; only a pick makes it less
    output      logic               pick_valid,
    input  wire logic               pick_ready,
    output      logic [QUEUE_W-1:0] pick_queue,
    output      logic [5:0]         pick_index,
    output      logic [2:0]         pick_count,
    output      logic               pick_wrap,
    // From sq_fetch: so many entries could not be read. Their places are given back, the queue stops.
    input  wire logic               bad_valid,
    output      logic               bad_ready,
    input  wire logic [QUEUE_W-1:0] bad_queue,
    input  wire logic [2:0]         bad_count,

    // From completion: an entry was posted; where the next one goes. A pulse.
    input  wire logic               posted_valid,
    input  wire logic [QUEUE_W-1:0] posted_queue,
    input  wire logic [5:0]         posted_tail,
    input  wire logic               posted_phase,

    output      logic               busy
);
    // ---- After reset every queue is disabled and has nothing in flight, one a cycle.
    logic [6:0]         sweep;
    wire                sweeping = !sweep[6];
    always_ff @(posedge clk) begin
        if (rst) sweep <= '0;
        else if (sweeping) sweep <= sweep + 7'd1;
    end

    // ---- What is kept of a queue. A ring's size is kept as the index of its last entry.
    (* ram_style = "distributed" *) logic [5:0] sq_last[64];
    (* ram_style = "distributed" *) logic [5:0] cq_last[64];
    (* ram_style = "distributed" *) logic       enabled[64];
    (* ram_style = "distributed" *) logic [5:0] sq_tail[64];     // by doorbells
    (* ram_style = "distributed" *) logic [5:0] cq_head[64];
    (* ram_style = "distributed" *) logic       stop_bell[64];
    (* ram_style = "distributed" *) logic [5:0] sq_head[64];     // by picks: the next entry to ask for
    (* ram_style = "distributed" *) logic [5:0] cq_promised[64]; // where the CQ's tail will be when all in flight are posted
    (* ram_style = "distributed" *) logic       stop_read[64];
    (* ram_style = "distributed" *) logic       blocked[64];     // for want of places in its CQ: its next CQ head rings
    (* ram_style = "distributed" *) logic [6:0] cq_tail[64];     // by completion: phase, tail

    // ---- Registers
    wire [QUEUE_W-1:0] wr_queue  = sweeping ? sweep[5:0] : qc_wr_addr[QUEUE_W+1:2];
    wire               wr_base   = qc_wr_en && qc_wr_addr[1:0] == 2'd0;
    wire               wr_sizes  = qc_wr_en && qc_wr_addr[1:0] == 2'd1;
    wire               wr_enable = sweeping || (wr_base && qc_wr_data[0]); // all but `enabled` as when it is enabled

    always_ff @(posedge clk) begin
        if (wr_sizes) begin
            sq_last[wr_queue] <= qc_wr_data[5:0] - 6'd1;
            cq_last[wr_queue] <= qc_wr_data[13:8] - 6'd1;
        end
        if (sweeping || wr_base) enabled[wr_queue] <= !sweeping && qc_wr_data[0];
    end

    // ---- Doorbells: a cycle after they come
    logic               bell;
    logic [QUEUE_W-1:0] bell_queue;
    logic               bell_cq;
    logic [15:0]        bell_value;
    always_ff @(posedge clk) begin
        bell <= db_valid && !rst && !sweeping;
        {bell_queue, bell_cq, bell_value} <= {db_queue, db_cq, db_value};
    end

    wire [5:0] value     = bell_value[5:0];
    wire [5:0] bell_last = bell_cq ? cq_last[bell_queue] : sq_last[bell_queue];
    wire [5:0] bell_head = cq_head[bell_queue];
    wire [5:0] bell_tail = cq_tail[bell_queue][5:0];
    wire       in_ring   = bell_value[15:6] == '0 && value <= bell_last;
    // From the head forward to the tail: both bounds hold, or one of them where that way leads across the ring's end.
    wire       from_head = value >= bell_head;
    wire       to_tail   = value <= bell_tail;
    wire       across    = bell_head > bell_tail;
    wire       consumed  = across ? from_head || to_tail : from_head && to_tail;
    wire       listens   = bell && enabled[bell_queue] && !stop_bell[bell_queue] && !stop_read[bell_queue];
    wire       accepted  = listens && in_ring && (!bell_cq || consumed);
    wire       refused   = listens && !(in_ring && (!bell_cq || consumed));

    // What was accepted counts a cycle later, by then it is in the memories.
    logic               told;
    logic [QUEUE_W-1:0] told_queue;
    logic               told_cq;
    logic               told_refused;
    always_ff @(posedge clk) begin
        told         <= accepted && !rst;
        told_refused <= refused && !rst;
        {told_queue, told_cq} <= {bell_queue, bell_cq};
    end
    wire       rings     = told && (!told_cq || blocked[told_queue]);

    wire [QUEUE_W-1:0] bell_at = wr_enable ? wr_queue : bell_queue; // never both: see qc_wr_ready
    always_ff @(posedge clk) begin
        if (wr_enable || (accepted && !bell_cq)) sq_tail[bell_at] <= wr_enable ? 6'd0 : value;
        if (wr_enable || (accepted && bell_cq)) cq_head[bell_at] <= wr_enable ? 6'd0 : value;
        if (wr_enable || refused) stop_bell[bell_at] <= !wr_enable;
        if (wr_enable || posted_valid) cq_tail[wr_enable ? wr_queue : posted_queue] <= wr_enable ? 7'h40 : {posted_phase, posted_tail};
    end

    // ---- Whose turn it is
    logic               found;
    logic [QUEUE_W-1:0] found_queue;
    logic               any;
    logic [3:0]         credit;
    logic               choose;   // `found` is taken
    logic               spend;    // so many of its commands were picked
    logic [2:0]         count;
    logic               again;    // there may be more
    logic [QUEUE_W-1:0] queue;
    queue_arbiter arbiter (
        .clk, .rst, .sweeping, .sweep(sweep[LF_W-1:0]), .fc_wr_en, .fc_wr_addr, .fc_wr_data, .ring_valid(rings), .ring_queue(told_queue),
        .found, .found_queue, .any, .choose, .credit, .spend, .spend_count(count), .again, .again_queue(queue)
    );

    // ---- One queue at a time: what is asked of it, its state, what follows
    typedef enum logic [1:0] {CHOOSE, READ, MEASURE, ACT} step_t;
    typedef enum logic [1:0] {PICK, LOOK, GIVE_BACK} task_t;
    step_t step;
    task_t task_;

    wire looks = qc_rd_valid && !sweeping;
    assign choose = step == CHOOSE && !sweeping && !bad_valid && !qc_wr_valid && !qc_rd_valid && found && room != '0;
    always_ff @(posedge clk) begin
        unique case (step)
            CHOOSE: begin
                task_ <= bad_valid ? GIVE_BACK : looks ? LOOK : PICK;
                queue <= bad_valid ? bad_queue : looks ? qc_rd_queue : found_queue;
                if (bad_valid || looks || choose) step <= READ;
            end
            READ: step <= MEASURE;
            MEASURE: if (task_ == PICK) step <= ACT; else if (task_ == LOOK || bad_ready) step <= CHOOSE;
            default: step <= CHOOSE;
        endcase
        if (rst) step <= CHOOSE;
    end

    // A write waits for the two things that would write the same memories: a doorbell and an entry posted.
    assign qc_wr_ready = step == CHOOSE && !sweeping && !bad_valid && !bell && !posted_valid;

    logic [5:0] tail, head, promised, last, c_head, c_tail, c_last;
    logic       phase, stopped, open;
    always_ff @(posedge clk) begin
        if (step == READ) begin
            tail     <= sq_tail[queue];
            head     <= sq_head[queue];
            last     <= sq_last[queue];
            promised <= cq_promised[queue];
            c_head   <= cq_head[queue];
            c_last   <= cq_last[queue];
            {phase, c_tail} <= cq_tail[queue];
            open     <= enabled[queue];
        end
        // A fault that comes while another is being told of is the queue's first one.
        if (step == READ) stopped <= stop_bell[queue] || stop_read[queue];
        else if (task_ == GIVE_BACK && told_refused && told_queue == queue) stopped <= 1'b1;
    end

    // ---- MEASURE: entries up to the tail or the ring's end, and places in the completion queue (one always stays empty); up to 4
    function automatic logic [2:0] at_most_4(input logic [5:0] n);
        return n > 6'd4 ? 3'd4 : n[2:0];
    endfunction

    wire [6:0] to_end  = {1'b0, last} - {1'b0, head} + 7'd1;
    wire [6:0] ahead   = {1'b0, tail} - {1'b0, head};
    wire [6:0] behind  = {1'b0, c_head} - {1'b0, promised} - 7'd1;
    wire [5:0] places  = behind[6] ? behind[5:0] + c_last + 6'd1 : behind[5:0];
    logic [2:0] entries_4, places_4;
    logic [2:0] allowed;   // by the turn's credit and by sq_fetch, whose room does not become less but by a pick
    logic [2:0] end_4;     // entries to the ring's end; 7: more than 4
    logic [6:0] c_end;     // places to the end of the completion queue's
    logic       laps;  // the tail is beyond the ring's end
    always_ff @(posedge clk) begin
        if (step == MEASURE) begin
            // With the tail behind it the head is not 0, so it is less than 64 to the end.
            entries_4 <= !open || stopped ? 3'd0 : ahead[6] ? at_most_4(to_end[5:0]) : at_most_4(ahead[5:0]);
            places_4  <= at_most_4(places);
            laps      <= ahead[6];
            allowed   <= credit < 4'(room) ? credit[2:0] : room;
            end_4     <= to_end > 7'd4 ? 3'd7 : to_end[2:0];
            c_end     <= {1'b0, c_last} - {1'b0, promised} + 7'd1;
        end
    end

    // ---- ACT: the pick
    wire [2:0] wanted  = entries_4 < places_4 ? entries_4 : places_4;
    assign count = wanted < allowed ? wanted : allowed;
    assign spend = step == ACT && count != '0;
    // For want of places it waits for a CQ head, unless one came since the state was read.
    wire   waits = entries_4 != '0 && places_4 == '0;
    wire   moved = told && told_cq && told_queue == queue;
    logic  moved_before;
    always_ff @(posedge clk) moved_before <= step != CHOOSE && (moved || moved_before);
    // More than were picked: also where 4 may be more, and beyond the ring's end.
    wire   more = laps || entries_4[2] || places_4 < entries_4 || allowed < entries_4;
    assign again = step == ACT && (waits ? moved || moved_before : entries_4 != '0 && more);

    wire       wraps  = count == end_4;
    wire       c_wraps = {4'd0, count} >= c_end;
    wire [5:0] promised_next = c_wraps ? {3'd0, count - c_end[2:0]} : promised + 6'(count);

    // GIVE_BACK, in MEASURE: the promise less what could not be read.
    wire [6:0] less = {1'b0, promised} - 7'(bad_count);
    wire [5:0] promised_less = less[6] ? less[5:0] + c_last + 6'd1 : less[5:0];
    assign bad_ready = step == MEASURE && task_ == GIVE_BACK && !bell && !told_refused; // one fault a cycle

    wire [QUEUE_W-1:0] pick_at = wr_enable ? wr_queue : queue;
    always_ff @(posedge clk) begin
        if (wr_enable || spend) sq_head[pick_at] <= wr_enable || wraps ? 6'd0 : head + 6'(count);
        if (wr_enable || spend || bad_ready) cq_promised[pick_at] <= wr_enable ? 6'd0 : bad_ready ? promised_less : promised_next;
        if (wr_enable || bad_ready) stop_read[pick_at] <= !wr_enable;
        if (wr_enable || step == ACT) blocked[pick_at] <= !wr_enable && waits;
    end

    always_ff @(posedge clk) begin
        if (spend) begin
            pick_valid <= 1'b1;
            {pick_queue, pick_index, pick_count, pick_wrap} <= {queue, head, count, wraps};
        end else if (pick_ready) begin
            pick_valid <= 1'b0;
        end
        if (rst) pick_valid <= 1'b0;
    end

    // ---- What the registers show
    wire [6:0] posted_less = {1'b0, promised} - {1'b0, c_tail};
    wire [5:0] in_flight   = posted_less[6] ? posted_less[5:0] + c_last + 6'd1 : posted_less[5:0];
    assign qc_rd_ready = step == MEASURE && task_ == LOOK;
    assign qc_rd_data  = {23'b0, stopped, 1'b0, in_flight, phase, 2'b0, c_head, 2'b0, c_tail, 2'b0, tail, 2'b0, head};

    always_ff @(posedge clk) begin
        fault_valid <= !rst && (refused || (bad_ready && !stopped)); // the first of a queue, no others
        fault_queue <= refused ? bell_queue : queue;
        fault_code  <= !refused ? 2'd3 : bell_cq ? 2'd2 : 2'd1;
    end

    assign busy = sweeping || bell || told || any || step != CHOOSE || pick_valid || fault_valid;

    wire unused = &{1'b0, qc_wr_data[63:14], qc_wr_data[7:6]};

`ifndef SYNTHESIS
    always_ff @(posedge clk) begin
        if (!rst) begin
            assert (!spend || !pick_valid || pick_ready) else $fatal(1, "doorbells: a pick of queue %0d before the last was taken", queue);
            assert (!spend || (open && !stopped)) else $fatal(1, "doorbells: queue %0d is picked, though closed", queue);
            assert (!qc_wr_en || (qc_wr_valid && qc_wr_ready)) else $fatal(1, "doorbells: a register is written that was not ready");
            assert (!wr_enable || !(accepted || refused || posted_valid || spend || bad_ready))
            else $fatal(1, "doorbells: queue %0d is enabled while a memory is written", wr_queue);
        end
    end
`endif
endmodule
`default_nettype wire
