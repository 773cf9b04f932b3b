// Reads submission queue entries from the host, many at a time, and passes them on in the order of asking.
//
//     doorbells ── pick_* ──► request ── hrd_* ──► host
//                    ▲ room      │ burst            │ hrr_* (tags in any mix)
//                    │           ▼                  ▼
//                    └───── table of bursts ◄── staging: 64 entries of 4 beats, 2 BRAM36
//                                │                  │
//                 took_* ◄───────┴──── in order ────┴──► f_* ──► decode
//
// Staging is a ring: a burst's entries lie one after another from the place that is its tag, so nothing has to be looked up when
// beats come. A burst leaves when its last beat has come. The slot is taken as an entry leaves. A burst of which any beat has
// `hrr_error` is dropped whole, because whose commands those were (their CIDs) is not known: `bad_*` gives the places back and
// stops the queue, fault code 3. So what leaves by `f_*` is always good.
// Invariants: entries leave in the order of `pick_*`; a place is not asked for again before it was left; the SQ head told by
// `took_*` covers only entries that were read. One beat a cycle in and out; 3 cycles from the last beat to the first out.
`default_nettype none

module sq_fetch
    import millrace_pkg::*;
#(
    parameter int AHEAD = 0  // entries read or being read beyond the free slots, 0 to 64
) (
    input  wire logic               clk,
    input  wire logic               rst,

    // Registers 1000h + 4q + word: word 0, the base (bits 47:12).
    input  wire logic               qc_wr_en,
    input  wire logic [QUEUE_W+1:0] qc_wr_addr,
    input  wire logic [63:0]        qc_wr_data,

    // From and to doorbells.
    output      logic [2:0]         room,
    input  wire logic               pick_valid,
    output      logic               pick_ready,
    input  wire logic [QUEUE_W-1:0] pick_queue,
    input  wire logic [5:0]         pick_index,
    input  wire logic [2:0]         pick_count,
    input  wire logic               pick_wrap,
    output      logic               bad_valid,
    input  wire logic               bad_ready,
    output      logic [QUEUE_W-1:0] bad_queue,
    output      logic [2:0]         bad_count,

    // Host reads: tags 00h to 3Fh. Answers with other tags are others'.
    output      logic               hrd_valid,
    input  wire logic               hrd_ready,
    output      logic [63:0]        hrd_addr,
    output      logic [4:0]         hrd_beats,
    output      logic [7:0]         hrd_tag,
    input  wire logic               hrr_valid,
    input  wire logic [7:0]         hrr_tag,
    input  wire logic [127:0]       hrr_data,
    input  wire logic               hrr_last,
    input  wire logic               hrr_error,

    // A free slot (slots.sv); taken with an entry's first beat.
    input  wire logic               slot_valid,
    input  wire logic [SLOT_W-1:0]  slot,
    output      logic               slot_take,
    input  wire logic [SLOT_W:0]    slots_free,

    // To decode: four beats an entry.
    output      logic               f_valid,
    input  wire logic               f_ready,
    output      logic [1:0]         f_beat,
    output      logic [SLOT_W-1:0]  f_slot,
    output      logic [QUEUE_W-1:0] f_queue,
    output      logic [127:0]       f_data,

    // To completion (and the counter of commands taken): a queue's SQ head after an entry. A pulse.
    output      logic               took_valid,
    output      logic [QUEUE_W-1:0] took_queue,
    output      logic [5:0]         took_head,
    output      logic [6:0]         staged      // entries read or being read, not yet in a slot
);
    if (AHEAD < 0 || AHEAD > 64) begin : g_check
        $error("sq_fetch: AHEAD must be 0 to 64");
    end

    // ---- After reset no burst has beats.
    logic [6:0] sweep;
    wire        sweeping = !sweep[6];
    always_ff @(posedge clk) begin
        if (rst) sweep <= '0;
        else if (sweeping) sweep <= sweep + 7'd1;
    end

    // ---- Requests
    (* ram_style = "distributed" *) logic [35:0] base[64];
    always_ff @(posedge clk) begin
        if (qc_wr_en && qc_wr_addr[1:0] == 2'd0) base[qc_wr_addr[QUEUE_W+1:2]] <= qc_wr_data[47:12];
    end
    wire unused = &{1'b0, qc_wr_data[63:48], qc_wr_data[11:0]};

    // What is known of a burst, at its first place. Done: its bit in `done` differs from what it was when it was asked for.
    typedef struct packed {
        logic [QUEUE_W-1:0] of;
        logic [5:0]         index;
        logic [2:0]         count;
        logic               wrap;
    } burst_t;
    (* ram_style = "distributed" *) burst_t     bursts[64];
    (* ram_style = "distributed" *) logic       want[64];
    (* ram_style = "distributed" *) logic [1:0] done[64];     // the bit, error
    logic [5:0] put;
    wire        pick = pick_valid && pick_ready;
    assign pick_ready = (!hrd_valid || hrd_ready) && !sweeping;
    always_ff @(posedge clk) begin
        if (pick) begin
            bursts[put] <= '{of: pick_queue, index: pick_index, count: pick_count, wrap: pick_wrap};
            want[put]   <= !done[put][1];
        end
    end
    always_ff @(posedge clk) begin
        if (pick) begin
            put       <= put + 6'(pick_count);
            hrd_valid <= 1'b1;
            hrd_addr  <= {16'd0, base[pick_queue], pick_index, 6'd0};
            hrd_beats <= {pick_count, 2'd0};
            hrd_tag   <= {2'd0, put};
        end else if (hrd_ready) begin
            hrd_valid <= 1'b0;
        end
        if (rst) begin
            put       <= '0;
            hrd_valid <= 1'b0;
        end
    end

    // ---- Answers: straight into staging
    (* ram_style = "block" *) logic [127:0] staging[256];
    (* ram_style = "distributed" *) logic [4:0] beats[64];    // so many have come; one with an error
    wire       mine   = hrr_valid && hrr_tag[7:6] == '0;
    wire [5:0] at     = hrr_tag[5:0];
    wire [4:0] come   = beats[at];
    wire       failed = come[0] || hrr_error;
    always_ff @(posedge clk) begin
        if (mine) staging[{at, 2'd0} + {4'd0, come[4:1]}] <= hrr_data;
    end
    always_ff @(posedge clk) begin
        if (sweeping) beats[sweep[5:0]] <= '0;
        else if (mine) beats[at] <= hrr_last ? '0 : {come[4:1] + 4'd1, failed};
    end
    always_ff @(posedge clk) begin
        if (mine && hrr_last) done[at] <= {want[at], failed};
    end

    // ---- In the order of asking: bursts
    logic [6:0] look_staged;   // entries from `look` on
    logic [5:0] look;
    burst_t     next, burst;
    logic       streaming;     // `burst` is being passed on
    logic       last;          // with its last entry
    logic [5:0] place;         // of its entry
    logic [1:0] beat;
    wire  [1:0] state   = done[look];
    // `look_staged` is a cycle behind what is loaded, dropped and asked for, so nothing is ready in the cycle after.
    logic       moved, dropped;
    logic [2:0] moved_by, asked;
    wire        ready   = look_staged != '0 && !moved && state[1] == want[look];
    wire        advance = streaming && (!f_valid || f_ready) && (beat != '0 || slot_valid);
    wire        entered = advance && beat == '0;
    wire        left    = advance && beat == 2'd3;
    wire        load    = ready && !state[0] && (!streaming || (left && last));
    wire        drop    = ready && state[0] && !streaming && !bad_valid;
    wire  [6:0] at_most = staged + (pick ? 7'(pick_count) : 7'd0) - (dropped ? 7'(moved_by) : 7'd0);
    assign next = bursts[look];
    always_ff @(posedge clk) begin
        if (load) last <= next.count == 3'd1;
        else if (left) last <= burst.count == 3'd2;
        if (load) burst <= next;
        else if (left) begin
            burst.index <= burst.index + 6'd1;
            burst.count <= burst.count - 3'd1;
        end
        if (load) place <= look;
        else if (left) place <= place + 6'd1;
        if (advance) beat <= beat + 2'd1;
        if (load) streaming <= 1'b1;
        else if (left && last) streaming <= 1'b0;
        if (load || drop) look <= look + 6'(next.count);
        moved       <= load || drop;
        dropped     <= drop;
        moved_by    <= next.count;
        asked       <= pick ? pick_count : 3'd0;
        look_staged <= look_staged + 7'(asked) - (moved ? 7'(moved_by) : 7'd0);
        staged      <= entered ? at_most - 7'd1 : at_most;
        if (rst) begin
            {look, look_staged, staged, beat, moved, dropped, asked} <= '0;
            streaming <= 1'b0;
        end
    end
    // A drop may come with the first beat of an entry only if both counted; it never does: it waits for `streaming` to end.
    always_ff @(posedge clk) begin
        if (drop) begin
            bad_valid <= 1'b1;
            bad_queue <= next.of;
            bad_count <= next.count;
        end else if (bad_ready) begin
            bad_valid <= 1'b0;
        end
        if (rst) bad_valid <= 1'b0;
    end

    // ---- Beats
    assign slot_take = entered;
    always_ff @(posedge clk) begin
        if (advance) f_data <= staging[{place, beat}];
    end
    always_ff @(posedge clk) begin
        if (advance) begin
            f_valid <= 1'b1;
            f_beat  <= beat;
            f_queue <= burst.of;
        end else if (f_ready) begin
            f_valid <= 1'b0;
        end
        if (entered) f_slot <= slot;
        took_valid <= entered;
        took_queue <= burst.of;
        took_head  <= burst.wrap && last ? 6'd0 : burst.index + 6'd1;
        if (rst) begin
            f_valid    <= 1'b0;
            took_valid <= 1'b0;
        end
    end

    // ---- Room: in staging, and of slots that those in staging will need. None while a pick is on its way.
    wire [7:0] places = 8'd64 - {1'b0, staged} - 8'(beat != '0); // the entry on its way out still lies there
    wire [8:0] slots_left = {2'b0, slots_free} + 9'(AHEAD) - {2'b0, staged};
    always_ff @(posedge clk) begin
        if (rst || sweeping || pick_valid) room <= '0;
        else if (places[7:2] == '0 && {1'b0, places} < slots_left) room <= places[2:0];
        else room <= slots_left[8:2] != '0 ? 3'd4 : slots_left[2:0];
    end

`ifndef SYNTHESIS
    always_ff @(posedge clk) begin
        if (!rst) begin
            assert (staged <= 7'd64) else $fatal(1, "sq_fetch: %0d entries in 64 places", staged);
            assert (look_staged + 7'(asked) - (moved ? 7'(moved_by) : 7'd0) <= staged)
            else $fatal(1, "sq_fetch: %0d entries to come of %0d", look_staged, staged);
            assert (!slots_left[8]) else $fatal(1, "sq_fetch: %0d entries for %0d slots", staged, slots_free);
            assert (!pick || (pick_count >= 3'd1 && pick_count <= 3'd4)) else $fatal(1, "sq_fetch: a pick of %0d", pick_count);
            assert (!mine || 7'(6'(at - look)) < look_staged) else $fatal(1, "sq_fetch: an answer nobody asked for: tag %0d", at);
            assert (!(drop && entered)) else $fatal(1, "sq_fetch: a burst dropped while another enters");
        end
    end
`endif
endmodule
`default_nettype wire
