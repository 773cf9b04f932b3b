// The commands in flight: which slots are free, whose command is in a slot, how many legs it still has.
//
//     sq_fetch ◄── slot, slot_take                 decode ── own_* ──► owner
//     submission ── leg_* ──► legs                            │
//     disks ── done_* ──► join: first failing status wins ──► ├──► cpl_* ──► completion
//     submission ── end_* (ended before any disk) ──────────► ┘                  │
//     free slots ◄── free_* ─────────────────────────────────────────────────────┘
//
// A command ends in one of two ways: by `end_*`, or when as many `done_*` have come as `leg_*` said. `leg_*` comes before the
// first `done_*` of its slot can be taken. Invariants: a slot is given to one command at a time; it is ended once; it is free again only
// when completion says that its entry is posted.
// A leg takes 2 cycles, the next one can be taken when it is done; an end 2; a slot freed can be taken 2 cycles later. For 64 cycles after reset no slot is free.
`default_nettype none

module slots
    import millrace_pkg::*;
#(
    parameter int SSDS = 16          // with one there is nothing to join
) (
    input  wire logic               clk,
    input  wire logic               rst,

    // To sq_fetch: a free slot, if `slot_valid`.
    output      logic               slot_valid,
    output      logic [SLOT_W-1:0]  slot,
    input  wire logic               slot_take,
    output      logic [SLOT_W:0]    slots_free,

    // From decode: whose it is. A pulse, before the command can end.
    input  wire logic               own_valid,
    input  wire logic [SLOT_W-1:0]  own_slot,
    input  wire owner_t             own,

    // From submission: a command goes to `leg_count` disks (1 to 16). A pulse.
    input  wire logic               leg_valid,
    input  wire logic [SLOT_W-1:0]  leg_slot,
    input  wire logic [4:0]         leg_count,

    // From submission: a command ends without a disk (`command_t.ended`).
    input  wire logic               end_valid,
    output      logic               end_ready,
    input  wire logic [SLOT_W-1:0]  end_slot,
    input  wire status_t            end_status,

    // From the disks' completion queues: one leg has ended.
    input  wire logic               done_valid,
    output      logic               done_ready,
    input  wire logic [SLOT_W-1:0]  done_slot,
    input  wire status_t            done_status,

    // To completion: a command has ended.
    output      logic               cpl_valid,
    input  wire logic               cpl_ready,
    output      logic [SLOT_W-1:0]  cpl_slot,
    output      owner_t             cpl_owner,
    output      status_t            cpl_status,

    // From completion: the entry is posted. A pulse.
    input  wire logic               free_valid,
    input  wire logic [SLOT_W-1:0]  free_slot
);
    localparam int SLOTS = 1 << SLOT_W;

    // ---- After reset every slot is put into the list of free ones, one a cycle; it has no legs.
    logic [SLOT_W:0]   sweep;
    wire               sweeping = !sweep[SLOT_W];
    wire  [SLOT_W-1:0] fresh    = sweep[SLOT_W-1:0];
    always_ff @(posedge clk) begin
        if (rst) sweep <= '0;
        else if (sweeping) sweep <= sweep + 1'b1;
    end

    // ---- Free slots: a ring
    (* ram_style = "distributed" *) logic [SLOT_W-1:0] free[SLOTS];
    logic [SLOT_W-1:0] head, tail;
    wire               put = sweeping || free_valid;
    always_ff @(posedge clk) begin
        if (put) free[tail] <= sweeping ? fresh : free_slot;
    end
    always_ff @(posedge clk) begin
        tail       <= tail + SLOT_W'(put);
        head       <= head + SLOT_W'(slot_take);
        slots_free <= slots_free + (SLOT_W + 1)'(put) - (SLOT_W + 1)'(slot_take);
        if (rst) {head, tail, slots_free} <= '0;
    end
    assign slot       = free[head];
    // From a register, because sq_fetch has much to do with it.
    wire more_than_one = slots_free[SLOT_W:1] != '0;
    always_ff @(posedge clk) begin
        slot_valid <= !sweeping && (put || more_than_one || (slots_free[0] && !slot_take));
        if (rst) slot_valid <= 1'b0;
    end

    // ---- Whose
    (* ram_style = "distributed" *) owner_t owners[SLOTS];
    always_ff @(posedge clk) if (own_valid) owners[own_slot] <= own;

    // ---- Legs: one that has ended is looked at for a cycle, or until a command that it ends can leave
    logic              leg;
    logic [SLOT_W-1:0] at;
    status_t           status;
    wire               last;      // the command's last
    wire status_t      joined;
    wire               room    = !cpl_valid || cpl_ready;
    wire               counted = leg && (!last || room);
    assign done_ready = !sweeping && !leg;
    always_ff @(posedge clk) begin
        if (!leg) begin
            leg    <= done_valid && !sweeping;
            at     <= done_slot;
            status <= done_status;
        end else if (counted) begin
            leg <= 1'b0;
        end
        if (rst) leg <= 1'b0;
    end
    if (SSDS == 1) begin : g_one
        assign last   = 1'b1;
        assign joined = status;
        wire unused = &{1'b0, leg_valid, leg_slot, leg_count};
    end else begin : g_join
        (* ram_style = "distributed" *) logic [4:0] legs[SLOTS];
        (* ram_style = "distributed" *) logic [4:0] ended[SLOTS];    // so many of them
        (* ram_style = "distributed" *) status_t    statuses[SLOTS]; // of those
        always_ff @(posedge clk) if (leg_valid) legs[leg_slot] <= leg_count;
        wire [4:0]         count   = ended[at] + 5'd1;
        wire [4:0]         all     = legs[at];
        wire status_t      earlier = statuses[at];
        wire [SLOT_W-1:0]  leg_at  = sweeping ? fresh : at;
        assign last   = count == all;
        assign joined = earlier != ST_SUCCESS ? earlier : status;
        always_ff @(posedge clk) begin
            if (sweeping || counted) begin
                ended[leg_at]    <= sweeping || last ? '0 : count;
                statuses[leg_at] <= sweeping || last ? ST_SUCCESS : joined;
            end
        end
    end

    // ---- Ends. Legs first: what ends without a disk waits at submission, so no further legs can come before it for long.
    wire joins = leg && last;
    assign end_ready = room && !leg;
    always_ff @(posedge clk) begin
        if (room) begin
            cpl_valid  <= joins || (end_valid && !leg);
            cpl_slot   <= joins ? at : end_slot;
            cpl_status <= joins ? joined : end_status;
        end
        if (rst) cpl_valid <= 1'b0;
    end
    assign cpl_owner = owners[cpl_slot];

`ifndef SYNTHESIS
    // What is known of each slot, for the invariants alone.
    logic [SLOTS-1:0] taken, over, split;
    always_ff @(posedge clk) begin
        if (rst || sweeping) begin
            taken <= '0;
            over  <= '0;
            split <= '0;
        end else begin
            if (slot_take) begin
                assert (slot_valid) else $fatal(1, "slots: taken though none is free");
                assert (!taken[slot]) else $fatal(1, "slots: slot %0d is taken twice", slot);
                taken[slot] <= 1'b1;
                over[slot]  <= 1'b0;
                split[slot] <= 1'b0;
            end
            if (leg_valid) begin
                assert (taken[leg_slot] && !over[leg_slot] && !split[leg_slot]) else $fatal(1, "slots: legs of slot %0d, which has none to get", leg_slot);
                assert (leg_count >= 5'd1 && leg_count <= 5'd16) else $fatal(1, "slots: %0d legs", leg_count);
                split[leg_slot] <= 1'b1;
            end
            if (counted) assert (split[at] && !over[at]) else $fatal(1, "slots: slot %0d has no leg to end", at);
            if (room && (joins || (end_valid && !leg))) begin
                if (!joins) assert (taken[end_slot] && !over[end_slot] && !split[end_slot]) else $fatal(1, "slots: slot %0d ends twice", end_slot);
                over[joins ? at : end_slot] <= 1'b1;
            end
            if (free_valid) begin
                assert (taken[free_slot] && over[free_slot]) else $fatal(1, "slots: slot %0d is freed before its end", free_slot);
                taken[free_slot] <= 1'b0;
            end
            assert ($countones(taken) + int'(slots_free) == SLOTS) else $fatal(1, "slots: %0d taken, %0d free", $countones(taken), slots_free);
        end
    end
`endif
endmodule
`default_nettype wire
