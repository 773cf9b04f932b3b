// The whole engine: the front, CORES cores and the crossbar between them, the host and the disks (docs/hardware.md).
//
//      bar_* ──► front ──db──► core 0 .. CORES-1 ──sdb/sdr/sdw──► crossbar ──► disk 0 .. SSDS-1
//      reg_* ──► front and cores        │
//                                       └──hrd/hwr──► crossbar ──► front (local function -> function) ──► host
//
// Ports are packed vectors, so that Verilator's C++ and Yosys take them as they are: `[SSDS-1:0][n-1:0]` is disk 0 in the lowest n bits.
// All of the contract's rules hold at these ports: `valid` never waits for `ready`, what is offered stays; hrr_* and bar_* are always taken.
//
// Register addresses (64-bit words): bits 19:16 choose the core, 15:0 are the core's map. The front has F7000h to F7FFFh:
//      F7000h + function   63 enabled, 11:8 core, 7:0 local function: whose doorbells go where. A function must be the only one of its
//                          place (core, local function); before it is moved its queues are to be disabled and idle.
//      F7800h              doorbells refused: offset outside the queues, function unknown or not enabled (31:0, counts, wraps)
//      F7801h              15:0 CORES, 31:16 FUNCTIONS, 47:32 SSDS
//      F7C00h + 40h * s    space s of FastPath, which lies between crossbar, front and host where there is one (fastpath.sv)
`default_nettype none
module engine #(
    parameter int FUNCTIONS = 16,
    parameter int CORES     = 1,
    parameter int SSDS      = 1,
    parameter int LF        = 16,
    parameter int QP        = 4,
    parameter int SLOTS     = 64,
    parameter int PAGES     = 512,
    parameter int LISTS     = 16,
    parameter logic [63:0] CHIP_BASE = 64'h0, // where disks find chip addresses
    parameter int FASTPATH  = 0,              // spaces of FastPath, to 16
    parameter logic [63:0] FP_WINDOW = 64'h0000_FFFF_FFE0_0000
) (
    input  wire                      clk,
    input  wire                      rst,
    // A guest's 4-byte write to its doorbell page (BAR0 + 1000h, stride 4): always taken, one a cycle.
    input  wire                      bar_valid,
    input  wire  [7:0]               bar_function,
    input  wire  [11:0]              bar_offset,
    input  wire  [31:0]              bar_data,
    // Registers: one access at a time; a write is answered by reg_rvalid as well.
    input  wire                      reg_valid,
    output logic                     reg_ready,
    input  wire                      reg_write,
    input  wire  [19:0]              reg_addr,
    input  wire  [63:0]              reg_wdata,
    output logic                     reg_rvalid,
    output logic [63:0]              reg_rdata,
    // Reads of host memory; the tag's upper four bits are the core.
    output logic                     hrd_valid,
    input  wire                      hrd_ready,
    output logic [63:0]              hrd_addr,
    output logic [4:0]               hrd_beats,
    output logic [11:0]              hrd_tag,
    input  wire                      hrr_valid,
    input  wire  [11:0]              hrr_tag,
    input  wire  [127:0]             hrr_data,
    input  wire                      hrr_last,
    input  wire                      hrr_error,
    // Writes to host memory (hwr_kind 0) and interrupts (1): then hwr_function and hwr_vector say whose.
    output logic                     hwr_valid,
    input  wire                      hwr_ready,
    output logic                     hwr_kind,
    output logic [63:0]              hwr_addr,
    output logic [127:0]             hwr_data,
    output logic [4:0]               hwr_bytes,
    output logic [7:0]               hwr_function,
    output logic [7:0]               hwr_vector,
    // To each disk: doorbells of its queue pair `sdb_core + 1`.
    output logic [SSDS-1:0]          sdb_valid,
    input  wire  [SSDS-1:0]          sdb_ready,
    output logic [SSDS-1:0][3:0]     sdb_core,
    output logic [SSDS-1:0]          sdb_cq,
    output logic [SSDS-1:0][15:0]    sdb_value,
    // From each disk: reads and writes of chip addresses (bits 17:14 the core).
    input  wire  [SSDS-1:0]          sdr_valid,
    output logic [SSDS-1:0]          sdr_ready,
    input  wire  [SSDS-1:0][17:0]    sdr_addr,
    input  wire  [SSDS-1:0][4:0]     sdr_beats,
    input  wire  [SSDS-1:0][7:0]     sdr_tag,
    output logic [SSDS-1:0]          sdd_valid,
    input  wire  [SSDS-1:0]          sdd_ready,
    output logic [SSDS-1:0][7:0]     sdd_tag,
    output logic [SSDS-1:0][127:0]   sdd_data,
    output logic [SSDS-1:0]          sdd_last,
    input  wire  [SSDS-1:0]          sdw_valid,
    output logic [SSDS-1:0]          sdw_ready,
    input  wire  [SSDS-1:0][17:0]    sdw_addr,
    input  wire  [SSDS-1:0][127:0]   sdw_data,
    // A core has a fault for the control processor (its register 0002h).
    output logic [CORES-1:0]         fault,
    // Something is pending inside: while this is low and nothing is offered from outside, the clock may stop.
    output logic                     busy
);
    import millrace_pkg::*;
    localparam int CORE_W = CORES > 1 ? $clog2(CORES) : 1;

    // Host ports as the crossbar has them.
    wire         x_hrd_valid, x_hrd_ready, x_hrr_valid, x_hrr_last, x_hrr_error, x_hwr_valid, x_hwr_ready, x_hwr_kind;
    wire [11:0]  x_hrr_tag;
    wire [127:0] x_hrr_data, x_hwr_data;
    wire [63:0]  x_hwr_addr;
    wire [4:0]   x_hwr_bytes;

    // ---- Registers: one access is kept here and offered to whom it is for. Its answer follows what the crossbar has to write, so that what
    // a queue shows as posted has left the engine.
    typedef enum logic [1:0] {IDLE, OFFER, WAIT, FOLLOW} access_t;
    access_t          access;
    logic             write;
    logic [15:0]      addr;
    logic [63:0]      wdata;
    logic [CORES-1:0] for_core;
    logic             for_front, for_fastpath;
    wire  [CORES-1:0] core_ready, core_rvalid;
    wire  [CORES-1:0][63:0] core_rdata;
    wire              front_ready, front_rvalid;
    wire  [63:0]      front_rdata;
    wire              fastpath_ready, fastpath_rvalid;
    wire  [63:0]      fastpath_rdata;
    wire  [CORES-1:0] core_reg_valid  = for_core & {CORES{access == OFFER}};
    wire              front_reg_valid = for_front && access == OFFER;
    wire              fastpath_reg_valid = for_fastpath && access == OFFER;
    wire              nobody = for_core == '0 && !for_front && !for_fastpath;   // a core that does not exist: reads as zero

    logic [63:0] answer;
    always_comb begin
        answer = (front_rdata & {64{front_rvalid}}) | (fastpath_rdata & {64{fastpath_rvalid}});
        for (int c = 0; c < CORES; c++) answer |= core_rdata[c] & {64{core_rvalid[c]}};
    end

    wire is_front    = reg_addr[19:12] == 8'hF7;
    wire is_fastpath = is_front && reg_addr[11:10] == 2'b11 && FASTPATH > 0;
    assign reg_ready = access == IDLE && !reg_rvalid;
    always_ff @(posedge clk) begin
        reg_rvalid <= 1'b0;
        unique case (access)
            IDLE: if (reg_valid && reg_ready) access <= OFFER;
            OFFER: if (nobody || (for_front && front_ready) || (for_fastpath && fastpath_ready) || |(core_ready & for_core)) access <= WAIT;
            WAIT: if (nobody || front_rvalid || fastpath_rvalid || |core_rvalid) begin
                access    <= FOLLOW;
                reg_rdata <= answer;
            end
            default: if (!x_hwr_valid || x_hwr_ready) begin
                access     <= IDLE;
                reg_rvalid <= 1'b1;
            end
        endcase
        if (access == IDLE) begin
            {write, addr, wdata} <= {reg_write, reg_addr[15:0], reg_wdata};
            for_front    <= is_front && !is_fastpath;
            for_fastpath <= is_fastpath;
            for (int c = 0; c < CORES; c++) for_core[c] <= reg_addr[19:16] == 4'(c) && !is_front;
        end
        if (rst) begin
            access     <= IDLE;
            reg_rvalid <= 1'b0;
        end
    end

    // ---- The front
    wire [CORES-1:0]   f_db_valid, db_valid;
    wire [QUEUE_W-1:0] f_db_queue;
    wire               f_db_cq;
    wire [15:0]        f_db_value;
    wire               bar_mine;     // FastPath's
    wire [7:0]         irq_function;
    wire [QUEUE_W-1:0] db_queue;
    wire               db_cq;
    wire [15:0]        db_value;
    wire [CORE_W-1:0]  hwr_core;
    wire               front_busy;
    front #(.FUNCTIONS(FUNCTIONS), .CORES(CORES), .SSDS(SSDS), .LF(LF), .QP(QP)) front (
        .clk, .rst, .bar_valid(bar_valid && !bar_mine), .bar_function, .bar_offset, .bar_data,
        .db_valid(f_db_valid), .db_queue(f_db_queue), .db_cq(f_db_cq), .db_value(f_db_value),
        .irq_core(hwr_core), .irq_local(x_hwr_addr[8+:LF_W]), .irq_function,
        .reg_valid(front_reg_valid), .reg_ready(front_ready), .reg_write(write), .reg_addr(addr[11:0]), .reg_wdata(wdata),
        .reg_rvalid(front_rvalid), .reg_rdata(front_rdata), .busy(front_busy)
    );
    assign hwr_vector = hwr_addr[7:0];

    // ---- Cores
    wire [CORES-1:0]        c_hrd_valid, c_hrd_ready, c_hrr_valid, c_hwr_valid, c_hwr_ready, c_hwr_kind;
    wire [CORES-1:0][63:0]  c_hrd_addr, c_hwr_addr;
    wire [CORES-1:0][4:0]   c_hrd_beats, c_hwr_bytes;
    wire [CORES-1:0][7:0]   c_hrd_tag;
    wire [7:0]              c_hrr_tag;
    wire [127:0]            c_hrr_data;
    wire                    c_hrr_last, c_hrr_error;
    wire [CORES-1:0][127:0] c_hwr_data;
    wire [CORES-1:0]        c_sdb_valid, c_sdb_ready, c_sdb_cq;
    wire [CORES-1:0][3:0]   c_sdb_ssd;
    wire [CORES-1:0][15:0]  c_sdb_value;
    wire [CORES-1:0]        c_sdr_valid, c_sdr_ready, c_sdd_valid, c_sdd_ready, c_sdd_last, c_sdw_valid, c_sdw_ready;
    wire [CORES-1:0][13:0]  c_sdr_addr, c_sdw_addr;
    wire [CORES-1:0][4:0]   c_sdr_beats;
    wire [CORES-1:0][7:0]   c_sdr_tag, c_sdd_tag;
    wire [CORES-1:0][127:0] c_sdd_data, c_sdw_data;
    wire [CORES-1:0]        core_busy;
    wire                    crossbar_busy;

    for (genvar c = 0; c < CORES; c++) begin : g_core
        core #(.LF(LF), .QP(QP), .SLOTS(SLOTS), .SSDS(SSDS), .PAGES(PAGES), .LISTS(LISTS), .CORE(c), .CHIP_BASE(CHIP_BASE)) core (
            .clk, .rst, .db_valid(db_valid[c]), .db_queue, .db_cq, .db_value,
            .reg_valid(core_reg_valid[c]), .reg_ready(core_ready[c]), .reg_write(write), .reg_addr(addr), .reg_wdata(wdata),
            .reg_rvalid(core_rvalid[c]), .reg_rdata(core_rdata[c]),
            .hrd_valid(c_hrd_valid[c]), .hrd_ready(c_hrd_ready[c]), .hrd_addr(c_hrd_addr[c]), .hrd_beats(c_hrd_beats[c]), .hrd_tag(c_hrd_tag[c]),
            .hrr_valid(c_hrr_valid[c]), .hrr_tag(c_hrr_tag), .hrr_data(c_hrr_data), .hrr_last(c_hrr_last), .hrr_error(c_hrr_error),
            .hwr_valid(c_hwr_valid[c]), .hwr_ready(c_hwr_ready[c]), .hwr_kind(c_hwr_kind[c]), .hwr_addr(c_hwr_addr[c]),
            .hwr_data(c_hwr_data[c]), .hwr_bytes(c_hwr_bytes[c]),
            .sdb_valid(c_sdb_valid[c]), .sdb_ready(c_sdb_ready[c]), .sdb_ssd(c_sdb_ssd[c]), .sdb_cq(c_sdb_cq[c]), .sdb_value(c_sdb_value[c]),
            .sdr_valid(c_sdr_valid[c]), .sdr_ready(c_sdr_ready[c]), .sdr_addr(c_sdr_addr[c]), .sdr_beats(c_sdr_beats[c]), .sdr_tag(c_sdr_tag[c]),
            .sdd_valid(c_sdd_valid[c]), .sdd_ready(c_sdd_ready[c]), .sdd_tag(c_sdd_tag[c]), .sdd_data(c_sdd_data[c]), .sdd_last(c_sdd_last[c]),
            .sdw_valid(c_sdw_valid[c]), .sdw_ready(c_sdw_ready[c]), .sdw_addr(c_sdw_addr[c]), .sdw_data(c_sdw_data[c]),
            .fault(fault[c]), .busy(core_busy[c])
        );
    end

    crossbar #(.CORES(CORES), .SSDS(SSDS)) crossbar (
        .clk, .rst,
        .c_hrd_valid, .c_hrd_ready, .c_hrd_addr, .c_hrd_beats, .c_hrd_tag, .c_hrr_valid, .c_hrr_tag, .c_hrr_data, .c_hrr_last, .c_hrr_error,
        .c_hwr_valid, .c_hwr_ready, .c_hwr_kind, .c_hwr_addr, .c_hwr_data, .c_hwr_bytes,
        .c_sdb_valid, .c_sdb_ready, .c_sdb_ssd, .c_sdb_cq, .c_sdb_value,
        .c_sdr_valid, .c_sdr_ready, .c_sdr_addr, .c_sdr_beats, .c_sdr_tag, .c_sdd_valid, .c_sdd_ready, .c_sdd_tag, .c_sdd_data, .c_sdd_last,
        .c_sdw_valid, .c_sdw_ready, .c_sdw_addr, .c_sdw_data,
        .hrd_valid(x_hrd_valid), .hrd_ready(x_hrd_ready), .hrd_addr, .hrd_beats, .hrd_tag,
        .hrr_valid(x_hrr_valid), .hrr_tag(x_hrr_tag), .hrr_data(x_hrr_data), .hrr_last(x_hrr_last), .hrr_error(x_hrr_error),
        .hwr_valid(x_hwr_valid), .hwr_ready(x_hwr_ready), .hwr_kind(x_hwr_kind), .hwr_addr(x_hwr_addr), .hwr_data(x_hwr_data),
        .hwr_bytes(x_hwr_bytes), .hwr_core,
        .sdb_valid, .sdb_ready, .sdb_core, .sdb_cq, .sdb_value, .sdr_valid, .sdr_ready, .sdr_addr, .sdr_beats, .sdr_tag,
        .sdd_valid, .sdd_ready, .sdd_tag, .sdd_data, .sdd_last, .sdw_valid, .sdw_ready, .sdw_addr, .sdw_data, .busy(crossbar_busy)
    );

    // ---- FastPath
    wire fastpath_busy;
    if (FASTPATH > 0) begin : g_fastpath
        assign hwr_function = irq_function & {8{hwr_kind}}; // a core's write may come while a record is offered
        fastpath #(.SPACES(FASTPATH), .CORES(CORES), .PAGES(PAGES), .WINDOW(FP_WINDOW)) fastpath (
            .clk, .rst, .bar_valid, .bar_function, .bar_offset, .bar_data, .bar_mine,
            .reg_valid(fastpath_reg_valid), .reg_ready(fastpath_ready), .reg_write(write), .reg_addr(addr[9:0]), .reg_wdata(wdata),
            .reg_rvalid(fastpath_rvalid), .reg_rdata(fastpath_rdata),
            .f_db_valid, .f_db_queue, .f_db_cq, .f_db_value, .db_valid, .db_queue, .db_cq, .db_value,
            .c_hrd_valid(x_hrd_valid), .c_hrd_ready(x_hrd_ready), .c_hrd_addr(hrd_addr), .c_hrd_beats(hrd_beats), .c_hrd_tag(hrd_tag),
            .c_hrr_valid(x_hrr_valid), .c_hrr_tag(x_hrr_tag), .c_hrr_data(x_hrr_data), .c_hrr_last(x_hrr_last), .c_hrr_error(x_hrr_error),
            .hrd_valid, .hrd_ready, .hrr_valid, .hrr_tag, .hrr_data, .hrr_last, .hrr_error,
            .c_hwr_valid(x_hwr_valid), .c_hwr_ready(x_hwr_ready), .c_hwr_kind(x_hwr_kind), .c_hwr_addr(x_hwr_addr), .c_hwr_data(x_hwr_data),
            .c_hwr_bytes(x_hwr_bytes), .hwr_valid, .hwr_ready, .hwr_kind, .hwr_addr, .hwr_data, .hwr_bytes, .busy(fastpath_busy)
        );
    end else begin : g_none
        assign bar_mine     = 1'b0;
        assign hwr_function = irq_function;
        assign {db_valid, db_queue, db_cq, db_value} = {f_db_valid, f_db_queue, f_db_cq, f_db_value};
        assign {hrd_valid, x_hrd_ready} = {x_hrd_valid, hrd_ready};
        assign {x_hrr_valid, x_hrr_tag, x_hrr_data, x_hrr_last, x_hrr_error} = {hrr_valid, hrr_tag, hrr_data, hrr_last, hrr_error};
        assign {hwr_valid, hwr_kind, hwr_addr, hwr_data, hwr_bytes} = {x_hwr_valid, x_hwr_kind, x_hwr_addr, x_hwr_data, x_hwr_bytes};
        assign x_hwr_ready = hwr_ready;
        assign {fastpath_ready, fastpath_rvalid, fastpath_rdata, fastpath_busy} = '0;
        wire unused = &{1'b0, fastpath_reg_valid};
    end

    assign busy = front_busy || crossbar_busy || fastpath_busy || |core_busy || access != IDLE || reg_rvalid;
endmodule
`default_nettype wire
