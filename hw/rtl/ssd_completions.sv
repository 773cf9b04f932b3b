// The disks' completion queues: 64 / SSDS places for each, in distributed RAM, looked at in turn for the phase tag that is due.
//
//   disks ──sdw_*──► places {status, phase, slot, head} ◄── look: disk after disk, one a cycle
//                       ▲                                     │ phase as due
//                     clear                                   ├──► done_* ──► slots
//                  (reset, ssd_write)                         ├──► head_* ──► submit: SQ head
//                                                             └──► cq_head, cq_due ──► ssd_doorbells: a quarter of the queue at a time
//
// Of an entry's 16 bytes only SQ head, CID, phase and status are kept; SQ identifier and command specific words are of no use here.
// A queue that starts anew is cleared first (its places' phase tags must be 0); nothing is written or submitted meanwhile.
// A CID that is no slot is passed over: the disk is not believed.
// Invariants: places are taken in order, each once; `done_*` stays until it is taken.
// Cycles: SSDS from an entry's write to `done_*` at most, and 1; one entry a cycle.
`default_nettype none

module ssd_completions
    import millrace_pkg::*;
#(
    parameter int  SSDS  = 1,
    localparam int N     = 64 / SSDS,
    localparam int N_W   = $clog2(N),
    localparam int SSD_W = SSDS > 1 ? $clog2(SSDS) : 1
) (
    input  wire logic                     clk,
    input  wire logic                     rst,

    input  wire logic                     sdw_valid,
    output      logic                     sdw_ready,
    input  wire logic [13:0]              sdw_addr,
    input  wire logic [127:0]             sdw_data,

    input  wire logic [SSDS-1:0]          ssd_write,
    input  wire logic [SSDS-1:0]          ssd_enabled,
    output      logic                     clearing,

    output      logic                     done_valid,
    input  wire logic                     done_ready,
    output      logic [SLOT_W-1:0]        done_slot,
    output      status_t                  done_status,

    output      logic [SSDS-1:0]          head_valid,   // a pulse
    output      logic [N_W-1:0]           head,

    output      logic [SSDS-1:0]          cq_due,       // so many were taken that the disk is to be told
    input  wire logic [SSDS-1:0]          cq_told,      // a pulse: it is, of `cq_head`
    output      logic [SSDS-1:0][N_W-1:0] cq_head
);
    localparam int BATCH = N >= 8 ? N / 4 : 1;

    typedef struct packed {
        status_t           status;
        logic              phase;
        logic [9:0]        beyond;  // the CID's bits above a slot's
        logic [SLOT_W-1:0] slot;
        logic [N_W-1:0]    head;
    } place_t;
    (* ram_style = "distributed" *) logic [$bits(place_t)-1:0] places[64];

    // ---- Clearing
    logic [SSDS-1:0] clear;
    logic [N_W-1:0]  clear_at;
    wire  [SSDS-1:0] clear_one = clear & (~clear + 1'b1);
    logic [5:0]      clear_base;
    always_comb begin
        clear_base = '0;
        for (int d = 0; d < SSDS; d++) if (clear_one[d]) clear_base |= 6'(d * N);
    end
    assign clearing = clear != '0;
    always_ff @(posedge clk) begin
        clear_at <= !clearing || int'(clear_at) == N - 1 ? '0 : clear_at + 1'b1;
        if (clearing && int'(clear_at) == N - 1) clear <= clear & ~clear_one;
        if (ssd_write != '0) begin
            clear    <= clear | ssd_write;
            clear_at <= '0;
        end
        if (rst) begin
            clear    <= '1;
            clear_at <= '0;
        end
    end

    // ---- Writes
    assign sdw_ready = !clearing;
    wire [N_W-1:0] said = N_W'(sdw_data[79:64]);
    // Without More (bit 126): it speaks of the disk's own log, which no guest reads.
    wire place_t written = '{status: {sdw_data[127], 1'b0, sdw_data[125:113]}, phase: sdw_data[112], beyond: sdw_data[111:102], slot: sdw_data[101:96], head: said};
    wire       write_en = clearing || (sdw_valid && sdw_addr[13:10] == 4'b1000);
    wire [5:0] write_at = clearing ? clear_base + 6'(clear_at) : sdw_addr[9:4];
    always_ff @(posedge clk) begin
        if (write_en) places[write_at] <= clearing ? '0 : written;
    end

    // ---- Looking
    logic [SSD_W-1:0] turn;
    logic [SSDS-1:0]  phase; // due
    logic [5:0]       base;
    logic [N_W-1:0]   here;
    logic             due;
    logic             usable;
    always_comb begin
        {base, here, due, usable} = '0;
        for (int d = 0; d < SSDS; d++) begin
            if (turn == SSD_W'(d)) begin
                base   = 6'(d * N);
                here   = cq_head[d];
                due    = phase[d];
                usable = ssd_enabled[d];
            end
        end
    end
    wire place_t place = places[base + 6'(here)];
    wire take = usable && !clearing && place.phase == due && (!done_valid || done_ready);
    wire wrap = int'(here) == N - 1;

    always_comb begin
        head_valid = '0;
        for (int d = 0; d < SSDS; d++) head_valid[d] = take && turn == SSD_W'(d);
    end
    assign head = place.head;

    always_ff @(posedge clk) begin
        if (rst) begin
            done_valid <= 1'b0;
            turn       <= '0;
        end else begin
            if (!done_valid || done_ready) done_valid <= take && place.beyond == '0;
            turn <= int'(turn) == SSDS - 1 ? '0 : turn + 1'b1;
        end
    end
    always_ff @(posedge clk) begin
        if (!done_valid || done_ready) begin
            done_slot   <= place.slot;
            done_status <= place.status;
        end
    end

    logic [SSDS-1:0][N_W-1:0] untold;
    always_comb begin
        for (int d = 0; d < SSDS; d++) cq_due[d] = int'(untold[d]) >= BATCH;
    end
    always_ff @(posedge clk) begin
        for (int d = 0; d < SSDS; d++) begin
            if (head_valid[d]) begin
                cq_head[d] <= wrap ? '0 : here + 1'b1;
                phase[d]   <= phase[d] ^ wrap;
            end
            untold[d] <= (cq_told[d] ? '0 : untold[d]) + N_W'(head_valid[d]);
            if (rst || ssd_write[d]) begin
                cq_head[d] <= '0;
                phase[d]   <= 1'b1;
                untold[d]  <= '0;
            end
        end
    end

    wire unused = &{1'b0, sdw_data, sdw_addr};
endmodule

`default_nettype wire
