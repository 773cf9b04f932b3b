// slots.sv: a slot is never given to two commands at a time, and none is lost. At any time the slots in use and those that lie in the
// ring of free ones are all slots, each once. And slots.sv's own assertions hold: no slot ends twice, none is freed before its end.
//
// What is assumed of the neighbours: sq_fetch takes only a slot that is offered; submission ends only commands that are in a slot and
// have not ended; completion frees only what has ended. Legs are left out (no leg comes). Proved for 8 slots.
//
// with: SLOT_W=3
// steps: 3
// within: 18
`default_nettype none

module slots_once
    import millrace_pkg::*;
(
    input  wire logic              clk,
    input  wire logic              rst,
    input  wire logic              slot_take,
    input  wire logic              end_valid,
    input  wire logic [SLOT_W-1:0] end_slot,
    input  wire logic              cpl_ready,
    input  wire logic              free_valid,
    input  wire logic [SLOT_W-1:0] free_slot,
    output      logic              reached
);
    localparam int SLOTS = 1 << SLOT_W;
    logic              slot_valid, end_ready, done_ready, cpl_valid;
    logic [SLOT_W-1:0] slot, cpl_slot;
    logic [SLOT_W:0]   slots_free;
    owner_t            cpl_owner;
    status_t           cpl_status;
    slots dut (
        .clk, .rst, .slot_valid, .slot, .slot_take, .slots_free, .own_valid(1'b0), .own_slot('0), .own('0), .leg_valid(1'b0), .leg_slot('0),
        .leg_count('0), .end_valid, .end_ready, .end_slot, .end_status('0), .done_valid(1'b0), .done_ready, .done_slot('0),
        .done_status('0), .cpl_valid, .cpl_ready, .cpl_slot, .cpl_owner, .cpl_status, .free_valid, .free_slot
    );

    logic [SLOTS-1:0] listed; // places of the ring that hold a free slot
    always_comb for (int i = 0; i < SLOTS; i++) listed[i] = {1'b0, SLOT_W'(SLOT_W'(i) - dut.head)} < slots_free;

    always_ff @(posedge clk) begin
        assume (!slot_take || slot_valid);
        assume (!end_valid || (dut.taken[end_slot] && !dut.over[end_slot] && !dut.split[end_slot]));
        assume (!free_valid || (dut.taken[free_slot] && dut.over[free_slot]));
        assume (!(free_valid && end_valid && free_slot == end_slot));
        if (!rst) begin
            assert (slots_free <= (SLOT_W + 1)'(SLOTS) && dut.tail == SLOT_W'(dut.head + slots_free[SLOT_W-1:0]));
            assert (dut.split == '0 && !dut.leg);
            assert (!slot_valid || (slots_free != '0 && !dut.sweeping));
            for (int i = 0; i < SLOTS; i++) begin
                assert (!listed[i] || !dut.taken[dut.free[i]]);
                for (int j = 0; j < i; j++) assert (!listed[i] || !listed[j] || dut.free[i] != dut.free[j]);
                if (dut.sweeping) assert (!listed[i] || dut.free[i] == SLOT_W'(i));
            end
            if (dut.sweeping) assert (dut.head == '0 && slots_free == dut.sweep && dut.taken == '0);
        end
    end
    assign reached = !rst && free_valid && slots_free == (SLOT_W + 1)'(SLOTS - 2);
endmodule
`default_nettype wire
