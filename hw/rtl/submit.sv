// The last step of a command: it ends, or its slot goes into the ring of each disk that it is for.
//
//   prp_list ──p_*──► ended? ──yes──► end_* ──► slots
//                       │ no
//                       ├──► leg_* ──► slots: so many disks will answer
//                       └──► one disk after the other: room? ──► ring_* ──► ssd_memory; tails ──► ssd_doorbells
//                                                         ▲
//                                       head_* (ssd_completions: how far the disk has read)
//
// A ring has N = 64 / SSDS places, disk d's from d * N on; one place stays empty. A disk that is not enabled is left out; when none is
// left, the command ends with Internal Error, to be tried again.
// Invariants: `leg_*` comes before the first doorbell that tells of the command; a ring's tail never reaches its head.
// Cycles: 1 and one per disk; a command that ends takes 1. A full ring stops those behind it until the disk answers something.
`default_nettype none

module submit
    import millrace_pkg::*;
#(
    parameter int  SSDS  = 1,
    localparam int N     = 64 / SSDS,
    localparam int N_W   = $clog2(N)
) (
    input  wire logic                     clk,
    input  wire logic                     rst,

    input  wire logic                     p_valid,
    output      logic                     p_ready,
    input  wire passed_t                  p,

    output      logic                     leg_valid,
    output      logic [SLOT_W-1:0]        leg_slot,
    output      logic [4:0]               leg_count,
    output      logic                     end_valid,
    input  wire logic                     end_ready,
    output      logic [SLOT_W-1:0]        end_slot,
    output      status_t                  end_status,

    output      logic                     ring_en,
    output      logic [5:0]               ring_index,
    output      logic [SLOT_W-1:0]        ring_slot,

    // Per disk: the ring starts anew, may be used, has read so far.
    input  wire logic [SSDS-1:0]          ssd_write,
    input  wire logic [SSDS-1:0]          ssd_enabled,
    input  wire logic                     wait_all,     // completion queues are being cleared
    input  wire logic [SSDS-1:0]          head_valid,
    input  wire logic [N_W-1:0]           head,

    output      logic [SSDS-1:0]          tail_moved,   // a pulse; the new tail from the next cycle on
    output      logic [SSDS-1:0][N_W-1:0] tail
);
    if (SSDS < 1 || SSDS > 16) begin : g_ssds
        $error("submit: SSDS must be 1 to 16");
    end

    logic [SSDS-1:0][N_W-1:0] heads;
    logic [SSDS-1:0]          left;     // disks that the command still goes to
    logic                     started;
    wire  [SSDS-1:0]          disks  = p.ssds[SSDS-1:0] & ssd_enabled;
    wire                      ends   = p.ended || disks == '0;
    wire  [SSDS-1:0]          chosen = left & (~left + 1'b1);

    function automatic logic [N_W-1:0] after(input logic [N_W-1:0] index);
        return int'(index) == N - 1 ? '0 : index + 1'b1;
    endfunction

    logic [N_W-1:0] chosen_tail;
    logic [5:0]     base;
    always_comb begin
        {chosen_tail, base} = '0;
        for (int d = 0; d < SSDS; d++) begin
            if (chosen[d]) begin
                chosen_tail |= tail[d];
                base        |= 6'(d * N);
            end
        end
    end
    wire [N_W-1:0] next = after(chosen_tail);
    // A ring's room is known a cycle after its tail moved; by then no other command has come so far.
    logic [SSDS-1:0] room;
    always_ff @(posedge clk) begin
        for (int d = 0; d < SSDS; d++) room[d] <= after(tail[d]) != heads[d];
    end
    wire           put  = started && (chosen & room) != '0;

    assign end_valid  = p_valid && !started && !wait_all && ends;
    assign end_slot   = p.slot;
    assign end_status = p.ended ? p.status : ST_INTERNAL_ERROR;
    assign leg_valid  = p_valid && !started && !wait_all && !ends;
    assign leg_slot   = p.slot;
    assign leg_count  = 5'($countones(disks));
    assign p_ready    = (end_valid && end_ready) || (put && left == chosen);

    assign ring_en    = put;
    assign ring_index = base + 6'(chosen_tail);
    assign ring_slot  = p.slot;
    assign tail_moved = put ? chosen : '0;

    always_ff @(posedge clk) begin
        if (rst) begin
            started <= 1'b0;
        end else if (leg_valid) begin
            started <= 1'b1;
            left    <= disks;
        end else if (put) begin
            left <= left & ~chosen;
            if (left == chosen) started <= 1'b0;
        end
    end

    always_ff @(posedge clk) begin
        for (int d = 0; d < SSDS; d++) begin
            if (head_valid[d]) heads[d] <= head;
            if (tail_moved[d]) tail[d] <= next;
            if (rst || ssd_write[d]) begin
                heads[d] <= '0;
                tail[d]  <= '0;
            end
        end
    end

    wire unused = &{1'b0, p};
endmodule

`default_nettype wire
