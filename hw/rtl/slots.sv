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
// A leg takes 2 cycles, an end 2; a slot freed can be taken 2 cycles later. For 64 cycles after reset no slot is free.
`default_nettype none

module slots
    import millrace_pkg::*;
(
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
endmodule
`default_nettype wire
