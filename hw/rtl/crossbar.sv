// Between the cores on one side and the host's port and the disks' on the other; up to 16 of each.
//
//      core c ── hrd ─┐                  ┌─► host reads, tag {core, tag}
//                     ├─ merge ──────────┤
//      core c ── hwr ─┘                  └─► host writes, with their core
//      core c ◄─ hrr ─────── by the tag's core ─── host
//      core c ── sdb ──► merge of disk s ──► disk s
//      core c ◄─ sdr, sdw ─ merge of core c ◄── disk s, by address bits 17:14
//      core c ── sdd ──► disk s, whose turn the two lists of readers say
//
// Every choice is in turn (merge.sv), so that each of n that want the same port gets one in n transfers. Writes and doorbells of one core
// keep their order, and so do reads and writes of one disk to one core. One transfer a cycle on each output; one cycle through.
//
// Answers to a disk come in the order of its reads, over all cores: a core answers in order, so `readers` of a core lists the disks that
// it has to answer, and `asked` of a disk the cores that it waits for. A core's answer moves when both lists agree. They always do in the
// end: a read enters both lists in the same cycle, so the oldest read of all is the first of both.
//
// A disk that addresses a core which does not exist is not answered, and only this disk's port stands.
`default_nettype none
module crossbar #(
    parameter int CORES = 1,
    parameter int SSDS  = 1,
    parameter int READS = 16, // reads of a disk, and of a core, that may be on their way; a power of two
    localparam int CORE_W = CORES > 1 ? $clog2(CORES) : 1,
    localparam int SSD_W  = SSDS > 1 ? $clog2(SSDS) : 1
) (
    input  wire                      clk,
    input  wire                      rst,
    // Cores
    input  wire  [CORES-1:0]         c_hrd_valid,
    output logic [CORES-1:0]         c_hrd_ready,
    input  wire  [CORES-1:0][63:0]   c_hrd_addr,
    input  wire  [CORES-1:0][4:0]    c_hrd_beats,
    input  wire  [CORES-1:0][7:0]    c_hrd_tag,
    output logic [CORES-1:0]         c_hrr_valid,
    output logic [7:0]               c_hrr_tag,
    output logic [127:0]             c_hrr_data,
    output logic                     c_hrr_last,
    output logic                     c_hrr_error,
    input  wire  [CORES-1:0]         c_hwr_valid,
    output logic [CORES-1:0]         c_hwr_ready,
    input  wire  [CORES-1:0]         c_hwr_kind,
    input  wire  [CORES-1:0][63:0]   c_hwr_addr,
    input  wire  [CORES-1:0][127:0]  c_hwr_data,
    input  wire  [CORES-1:0][4:0]    c_hwr_bytes,
    input  wire  [CORES-1:0]         c_sdb_valid,
    output logic [CORES-1:0]         c_sdb_ready,
    input  wire  [CORES-1:0][3:0]    c_sdb_ssd,
    input  wire  [CORES-1:0]         c_sdb_cq,
    input  wire  [CORES-1:0][15:0]   c_sdb_value,
    output logic [CORES-1:0]         c_sdr_valid,
    input  wire  [CORES-1:0]         c_sdr_ready,
    output logic [CORES-1:0][13:0]   c_sdr_addr,
    output logic [CORES-1:0][4:0]    c_sdr_beats,
    output logic [CORES-1:0][7:0]    c_sdr_tag,
    input  wire  [CORES-1:0]         c_sdd_valid,
    output logic [CORES-1:0]         c_sdd_ready,
    input  wire  [CORES-1:0][7:0]    c_sdd_tag,
    input  wire  [CORES-1:0][127:0]  c_sdd_data,
    input  wire  [CORES-1:0]         c_sdd_last,
    output logic [CORES-1:0]         c_sdw_valid,
    input  wire  [CORES-1:0]         c_sdw_ready,
    output logic [CORES-1:0][13:0]   c_sdw_addr,
    output logic [CORES-1:0][127:0]  c_sdw_data,
    // Host
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
    output logic                     hwr_valid,
    input  wire                      hwr_ready,
    output logic                     hwr_kind,
    output logic [63:0]              hwr_addr,
    output logic [127:0]             hwr_data,
    output logic [4:0]               hwr_bytes,
    output logic [CORE_W-1:0]        hwr_core,
    // Disks
    output logic [SSDS-1:0]          sdb_valid,
    input  wire  [SSDS-1:0]          sdb_ready,
    output logic [SSDS-1:0][3:0]     sdb_core,
    output logic [SSDS-1:0]          sdb_cq,
    output logic [SSDS-1:0][15:0]    sdb_value,
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
    // Something is on its way inside.
    output logic                     busy
);
    if (CORES < 1 || CORES > 16 || SSDS < 1 || SSDS > 16) begin : g_ports
        $error("crossbar: CORES and SSDS must be 1 to 16");
    end
    if (READS < 2 || (READS & (READS - 1)) != 0) begin : g_reads
        $error("crossbar: READS must be a power of two, at least 2");
    end

    // ---- Host reads
    localparam int HRD = 64 + 5 + 8;
    wire [CORES-1:0][HRD-1:0] c_hrd;
    wire [CORE_W-1:0]         hrd_core;
    wire [7:0]                hrd_inner;
    for (genvar c = 0; c < CORES; c++) begin : g_hrd
        assign c_hrd[c] = {c_hrd_addr[c], c_hrd_beats[c], c_hrd_tag[c]};
    end
    merge #(.N(CORES), .WIDTH(HRD)) hrd_merge (
        .clk, .rst, .in_valid(c_hrd_valid), .in_ready(c_hrd_ready), .in_data(c_hrd),
        .out_valid(hrd_valid), .out_ready(hrd_ready), .out_data({hrd_addr, hrd_beats, hrd_inner}), .out_from(hrd_core)
    );
    assign hrd_tag = {4'(hrd_core), hrd_inner};

    always_ff @(posedge clk) begin
        for (int c = 0; c < CORES; c++) c_hrr_valid[c] <= hrr_valid && hrr_tag[11:8] == 4'(c) && !rst;
        c_hrr_tag   <= hrr_tag[7:0];
        c_hrr_data  <= hrr_data;
        c_hrr_last  <= hrr_last;
        c_hrr_error <= hrr_error;
    end

    // ---- Host writes
    localparam int HWR = 1 + 64 + 128 + 5;
    wire [CORES-1:0][HWR-1:0] c_hwr;
    for (genvar c = 0; c < CORES; c++) begin : g_hwr
        assign c_hwr[c] = {c_hwr_kind[c], c_hwr_addr[c], c_hwr_data[c], c_hwr_bytes[c]};
    end
    merge #(.N(CORES), .WIDTH(HWR)) hwr_merge (
        .clk, .rst, .in_valid(c_hwr_valid), .in_ready(c_hwr_ready), .in_data(c_hwr),
        .out_valid(hwr_valid), .out_ready(hwr_ready), .out_data({hwr_kind, hwr_addr, hwr_data, hwr_bytes}), .out_from(hwr_core)
    );

    // ---- Doorbells of disks
    localparam int SDB = 1 + 16;
    wire [CORES-1:0][SDB-1:0]   c_sdb;
    wire [SSDS-1:0][CORES-1:0]  sdb_taken;
    for (genvar c = 0; c < CORES; c++) begin : g_sdb_core
        assign c_sdb[c] = {c_sdb_cq[c], c_sdb_value[c]};
        always_comb begin
            c_sdb_ready[c] = 1'b0;
            for (int s = 0; s < SSDS; s++) c_sdb_ready[c] |= sdb_taken[s][c];
        end
    end
    for (genvar s = 0; s < SSDS; s++) begin : g_sdb
        logic [CORES-1:0]  wanted;
        wire  [CORE_W-1:0] core;
        for (genvar c = 0; c < CORES; c++) begin : g_wanted
            assign wanted[c] = c_sdb_valid[c] && c_sdb_ssd[c] == 4'(s);
        end
        merge #(.N(CORES), .WIDTH(SDB)) sdb_merge (
            .clk, .rst, .in_valid(wanted), .in_ready(sdb_taken[s]), .in_data(c_sdb),
            .out_valid(sdb_valid[s]), .out_ready(sdb_ready[s]), .out_data({sdb_cq[s], sdb_value[s]}), .out_from(core)
        );
        assign sdb_core[s] = 4'(core);
    end

    // ---- Reads by disks: into a core, and into the two lists
    localparam int SDR = 14 + 5 + 8;
    wire [SSDS-1:0][SDR-1:0]   s_sdr;
    wire [CORES-1:0][SSDS-1:0] sdr_taken;   // by core c from disk s
    wire [CORES-1:0]           readers_room, readers_valid, readers_pop;
    wire [CORES-1:0][SSD_W-1:0] readers_first;
    wire [SSDS-1:0]            asked_room, asked_valid, asked_pop;
    wire [SSDS-1:0][CORE_W-1:0] asked_first, asked_in;
    for (genvar s = 0; s < SSDS; s++) begin : g_sdr_disk
        assign s_sdr[s] = {sdr_addr[s][13:0], sdr_beats[s], sdr_tag[s]};
        logic [CORES-1:0] taken;
        for (genvar c = 0; c < CORES; c++) begin : g_taken
            assign taken[c] = sdr_taken[c][s];
        end
        assign sdr_ready[s] = |taken;
        one_of #(.N(CORES)) asked_core (.bits(taken), .index(asked_in[s]));
        wire [$clog2(READS):0] level;
        fifo #(.WIDTH(CORE_W), .DEPTH(READS)) asked (
            .clk, .rst, .in_valid(|taken), .in_ready(asked_room[s]), .in_data(asked_in[s]),
            .out_valid(asked_valid[s]), .out_ready(asked_pop[s]), .out_data(asked_first[s]), .count(level)
        );
        wire unused = &{1'b0, level};
    end
    for (genvar c = 0; c < CORES; c++) begin : g_sdr
        logic [SSDS-1:0] wanted;
        wire [SSD_W-1:0] from, reader;
        wire [$clog2(READS):0] level;
        for (genvar s = 0; s < SSDS; s++) begin : g_wanted
            assign wanted[s] = sdr_valid[s] && sdr_addr[s][17:14] == 4'(c) && asked_room[s] && readers_room[c];
        end
        merge #(.N(SSDS), .WIDTH(SDR)) sdr_merge (
            .clk, .rst, .in_valid(wanted), .in_ready(sdr_taken[c]), .in_data(s_sdr),
            .out_valid(c_sdr_valid[c]), .out_ready(c_sdr_ready[c]), .out_data({c_sdr_addr[c], c_sdr_beats[c], c_sdr_tag[c]}), .out_from(from)
        );
        one_of #(.N(SSDS)) reader_of (.bits(sdr_taken[c]), .index(reader));
        fifo #(.WIDTH(SSD_W), .DEPTH(READS)) readers (
            .clk, .rst, .in_valid(|sdr_taken[c]), .in_ready(readers_room[c]), .in_data(reader),
            .out_valid(readers_valid[c]), .out_ready(readers_pop[c]), .out_data(readers_first[c]), .count(level)
        );
        wire unused = &{1'b0, level, from};
    end

    // ---- Their answers
    for (genvar s = 0; s < SSDS; s++) begin : g_sdd
        wire [CORE_W-1:0] core = asked_first[s];
        wire room = !sdd_valid[s] || sdd_ready[s];
        wire mine = asked_valid[s] && int'(core) < CORES && readers_valid[core] && readers_first[core] == SSD_W'(s);
        wire move = mine && c_sdd_valid[core] && room;
        assign asked_pop[s] = move && c_sdd_last[core];
        always_ff @(posedge clk) begin
            if (room) begin
                sdd_valid[s] <= move;
                sdd_tag[s]   <= c_sdd_tag[core];
                sdd_data[s]  <= c_sdd_data[core];
                sdd_last[s]  <= c_sdd_last[core];
            end
            if (rst) sdd_valid[s] <= 1'b0;
        end
    end
    for (genvar c = 0; c < CORES; c++) begin : g_sdd_core
        wire [SSD_W-1:0] disk = readers_first[c];
        wire mine = readers_valid[c] && asked_valid[disk] && asked_first[disk] == CORE_W'(c);
        assign c_sdd_ready[c] = mine && (!sdd_valid[disk] || sdd_ready[disk]);
        assign readers_pop[c] = c_sdd_ready[c] && c_sdd_valid[c] && c_sdd_last[c];
    end

    // ---- Writes by disks
    localparam int SDW = 14 + 128;
    wire [SSDS-1:0][SDW-1:0]   s_sdw;
    wire [CORES-1:0][SSDS-1:0] sdw_taken;
    for (genvar s = 0; s < SSDS; s++) begin : g_sdw_disk
        assign s_sdw[s] = {sdw_addr[s][13:0], sdw_data[s]};
        always_comb begin
            sdw_ready[s] = 1'b0;
            for (int c = 0; c < CORES; c++) sdw_ready[s] |= sdw_taken[c][s];
        end
    end
    for (genvar c = 0; c < CORES; c++) begin : g_sdw
        logic [SSDS-1:0] wanted;
        wire [SSD_W-1:0] from;
        for (genvar s = 0; s < SSDS; s++) begin : g_wanted
            assign wanted[s] = sdw_valid[s] && sdw_addr[s][17:14] == 4'(c);
        end
        merge #(.N(SSDS), .WIDTH(SDW)) sdw_merge (
            .clk, .rst, .in_valid(wanted), .in_ready(sdw_taken[c]), .in_data(s_sdw),
            .out_valid(c_sdw_valid[c]), .out_ready(c_sdw_ready[c]), .out_data({c_sdw_addr[c], c_sdw_data[c]}), .out_from(from)
        );
        wire unused = &{1'b0, from};
    end

    assign busy = hrd_valid || hwr_valid || |c_hrr_valid || |sdb_valid || |c_sdr_valid || |asked_valid || |sdd_valid || |c_sdw_valid;

`ifndef SYNTHESIS
    always_ff @(posedge clk) if (!rst) begin
        for (int s = 0; s < SSDS; s++) begin
            assert (!sdr_valid[s] || int'(sdr_addr[s][17:14]) < CORES) else $fatal(1, "crossbar: disk %0d reads of core %0d", s, sdr_addr[s][17:14]);
            assert (!sdw_valid[s] || int'(sdw_addr[s][17:14]) < CORES) else $fatal(1, "crossbar: disk %0d writes to core %0d", s, sdw_addr[s][17:14]);
        end
        for (int c = 0; c < CORES; c++) begin
            assert (!c_sdb_valid[c] || int'(c_sdb_ssd[c]) < SSDS) else $fatal(1, "crossbar: core %0d rings disk %0d", c, c_sdb_ssd[c]);
            assert (!c_sdd_valid[c] || readers_valid[c]) else $fatal(1, "crossbar: core %0d answers a read that nobody asked for", c);
        end
    end
`endif
endmodule
`default_nettype wire
