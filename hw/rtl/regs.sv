// The control processor's port of a core: one access at a time; what belongs to no module is kept here, the rest goes to its module.
//
//      reg_* ─┬─► own words: identity, in flight, faults, time, counters, disks
//             ├─► 1000h  qc_*    queues          (doorbells, sq_fetch, completion, interrupts)
//             ├─► 2000h  fc_*    coalescing and weights   (interrupts, doorbells)
//             ├─► 3000h  cfg_*   configurations  (commands)
//             └─► 8000h  page_*  pages           (commands)
//
// An access stands at the port until it is carried out: `reg_ready` is given then, and `reg_rvalid` a cycle later. What a module calls
// `ready` it may withhold for some cycles, while its own work has the memory. Only own words and a queue's word 3 are read; all else, and
// what is at no address, reads as zero and is written in vain.
//
// Faults wait in order in a list as long as there are queues. A queue stops at its first fault, so the list overflows only if queues are
// enabled again with faults unread; then the newest is dropped, and the queue's own register still says that it stopped.
// Cycles: 1 and what the module takes; counters up to 65.
`default_nettype none
module regs
    import millrace_pkg::*;
#(
    parameter int LF    = 16,
    parameter int QP    = 4,
    parameter int SLOTS = 64,
    parameter int SSDS  = 1,
    parameter int PAGES = 512
) (
    input  wire                clk,
    input  wire                rst,
    input  wire                reg_valid,
    output logic               reg_ready,
    input  wire                reg_write,
    input  wire  [15:0]        reg_addr,
    input  wire  [63:0]        reg_wdata,
    output logic               reg_rvalid,
    output logic [63:0]        reg_rdata,
    // Queues: carried out everywhere in the cycle of qc_wr_en, when all who take part are ready.
    output logic               qc_wr_valid,
    input  wire                qc_wr_ready,
    output logic               qc_wr_en,
    output logic [QUEUE_W+1:0] qc_wr_addr,
    output logic               qc_rd_valid,
    input  wire                qc_rd_ready,
    input  wire  [63:0]        qc_rd_data,
    // Coalescing and weights, pages: done in the same cycle. Configurations: `cfg_wr_en` stays until it is ready.
    output logic               fc_wr_en,
    output logic [LF_W+2:0]    fc_wr_addr,
    output logic               cfg_wr_en,
    input  wire                cfg_wr_ready,
    output logic [11:0]        cfg_wr_addr,
    output logic               page_wr_en,
    output logic [14:0]        page_wr_addr,
    output logic [63:0]        wr_data,      // of all of them
    // A disk's queue pair was written; enabled from the next cycle on.
    output logic [SSDS-1:0]    ssd_write,
    output logic [SSDS-1:0]    ssd_enabled,
    // What the core tells.
    input  wire  [7:0]         in_flight,
    input  wire                taken,        // one command more, and so on
    input  wire                posted,
    input  wire                interrupted,
    input  wire                fault_valid,
    input  wire  [QUEUE_W-1:0] fault_queue,
    input  wire  [1:0]         fault_code,
    output logic               fault,        // there is one to be read
    output logic [31:0]        now           // in units of 64 cycles
);
    if (SSDS < 1 || SSDS > 16 || SLOTS > 255 || LF > 255 || QP > 255 || PAGES > 65535) begin : g_check
        $error("regs: a size does not fit into the identity");
    end

    // ---- Whose it is
    wire offered  = reg_valid && !reg_rvalid;
    wire own      = reg_addr[15:12] == 4'h0;
    wire queues   = reg_addr[15:12] == 4'h1;
    wire by_queue = offered && queues && int'(reg_addr[11:QUEUE_W+2]) == 0;

    assign wr_data      = reg_wdata;
    assign qc_wr_addr   = reg_addr[QUEUE_W+1:0];
    // From a register: many have to say whether they are ready.
    always_ff @(posedge clk) qc_wr_valid <= by_queue && reg_write && !qc_wr_en && !rst;
    assign qc_wr_en     = qc_wr_valid && qc_wr_ready;
    assign qc_rd_valid  = by_queue && !reg_write && reg_addr[1:0] == 2'd3;
    assign fc_wr_addr   = reg_addr[LF_W+2:0];
    assign fc_wr_en     = offered && reg_write && reg_addr[15:12] == 4'h2 && int'(reg_addr[11:LF_W+3]) == 0;
    assign cfg_wr_addr  = reg_addr[11:0];
    assign cfg_wr_en    = offered && reg_write && reg_addr[15:12] == 4'h3;
    assign page_wr_addr = reg_addr[14:0];
    assign page_wr_en   = offered && reg_write && reg_addr[15] && int'(reg_addr[14:0]) < LF * PAGES;

    // ---- Own words
    wire        is_ssd     = reg_addr[11:4] == 8'h01;
    wire        is_counter = reg_addr[11:0] inside {12'h004, 12'h005, 12'h006};
    wire        count      = offered && own && !reg_write && is_counter;
    wire        counter_done;
    wire [63:0] counter;
    counters #(.N(4)) counters (
        .clk, .rst, .count({1'b0, interrupted, posted, taken}),
        .read_valid(count), .read_index(reg_addr[1:0]), .read_done(counter_done), .read_data(counter)
    );

    wire                fault_take = offered && own && !reg_write && reg_addr[11:0] == 12'h002;
    wire [QUEUE_W-1:0]  first_queue;
    wire [1:0]          first_code;
    wire [QUEUE_W:0]    fault_count;
    wire                fault_room;
    fifo #(.WIDTH(QUEUE_W + 2), .DEPTH(1 << QUEUE_W)) faults (
        .clk, .rst, .in_valid(fault_valid), .in_ready(fault_room), .in_data({fault_queue, fault_code}),
        .out_valid(fault), .out_ready(fault_take), .out_data({first_queue, first_code}), .count(fault_count)
    );
    wire unused = &{1'b0, fault_count, fault_room};

    logic [5:0] part;
    always_ff @(posedge clk) begin
        part <= part + 6'd1;
        if (&part) now <= now + 32'd1;
        if (rst) {part, now} <= '0;
    end

    always_comb begin
        for (int s = 0; s < SSDS; s++) ssd_write[s] = offered && own && reg_write && is_ssd && reg_addr[3:0] == 4'(s);
    end
    always_ff @(posedge clk) begin
        for (int s = 0; s < SSDS; s++) if (ssd_write[s]) ssd_enabled[s] <= reg_wdata[0];
        if (rst) ssd_enabled <= '0;
    end

    logic [63:0] word;
    always_comb begin
        word = '0;
        unique case (reg_addr[11:0])
            12'h000: word = {16'(PAGES), 8'(SSDS), 8'(SLOTS), 8'(QP), 8'(LF), 16'd1};
            12'h001: word = 64'(in_flight);
            12'h002: word = {fault, 45'b0, first_code, 16'(first_queue)} & {64{fault}};
            12'h003: word = 64'(now);
            default: begin
                if (is_counter) word = counter;
                for (int s = 0; s < SSDS; s++) if (is_ssd && reg_addr[3:0] == 4'(s)) word[0] = ssd_enabled[s];
            end
        endcase
    end

    // ---- Its end
    always_comb begin
        reg_ready = offered;
        if (by_queue && reg_write) reg_ready = qc_wr_en;
        if (qc_rd_valid) reg_ready = qc_rd_ready;
        if (cfg_wr_en) reg_ready = cfg_wr_ready;
        if (count) reg_ready = counter_done;
    end
    always_ff @(posedge clk) begin
        reg_rvalid <= reg_ready && !rst;
        reg_rdata  <= qc_rd_valid ? qc_rd_data : own && !reg_write ? word : '0;
    end
endmodule
`default_nettype wire
