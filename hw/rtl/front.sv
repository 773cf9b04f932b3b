// What functions touch: their isolated doorbell pages, and the numbers by which interrupts find them.
//
//      bar_* ─► offset ─► table[function] ─► db_* of the function's core      (2 cycles)
//                 │             │
//                 └──── refused ┴─► counted
//      irq_core, irq_local ─► reverse table ─► irq_function                    (combinational)
//
// A function's page reaches the queues of its own place (core, local function) and nothing else: the place comes from the table, only
// the queue's number and SQ or CQ from the offset. Offsets of the admin queue (it is software's), beyond QP or not of a doorbell, and
// pages of functions that are not enabled, are refused and counted. A value of more than 16 bits is passed on as FFFFh, which the core
// refuses as it refuses any value not less than the queue's size.
//
// Registers (reg_addr): 0000h + function, 0800h refused doorbells, 0801h sizes; see engine.sv. Answered in the next cycle.
// Tables are RAM: after reset they are cleared row by row (256 cycles or as many as there are places), and until then `busy` is high,
// doorbells are refused, registers wait.
`default_nettype none
module front #(
    parameter int FUNCTIONS = 16,
    parameter int CORES     = 1,
    parameter int SSDS      = 1,
    parameter int LF        = 16,
    parameter int QP        = 4,
    localparam int CORE_W   = CORES > 1 ? $clog2(CORES) : 1,
    localparam int LF_W     = LF > 1 ? $clog2(LF) : 1,
    localparam int QP_W     = QP > 1 ? $clog2(QP) : 1,
    localparam int QUEUE_W  = LF_W + QP_W
) (
    input  wire                clk,
    input  wire                rst,
    input  wire                bar_valid,
    input  wire  [7:0]         bar_function,
    input  wire  [11:0]        bar_offset,
    input  wire  [31:0]        bar_data,
    output logic [CORES-1:0]   db_valid,
    output logic [QUEUE_W-1:0] db_queue,
    output logic               db_cq,
    output logic [15:0]        db_value,
    input  wire  [CORE_W-1:0]  irq_core,
    input  wire  [LF_W-1:0]    irq_local,
    output logic [7:0]         irq_function,
    input  wire                reg_valid,
    output logic               reg_ready,
    input  wire                reg_write,
    input  wire  [11:0]        reg_addr,
    input  wire  [63:0]        reg_wdata,
    output logic               reg_rvalid,
    output logic [63:0]        reg_rdata,
    output logic               busy
);
    localparam int FUNCTION_W = FUNCTIONS > 1 ? $clog2(FUNCTIONS) : 1;
    localparam int PLACES_W   = CORE_W + LF_W;
    localparam int CLEAR_W    = FUNCTION_W > PLACES_W ? FUNCTION_W : PLACES_W;

    if (FUNCTIONS < 1 || FUNCTIONS > 253) begin : g_functions
        $error("front: FUNCTIONS must be 1 to 253");
    end
    if (CORES < 1 || CORES > 16 || LF < 2 || LF > 256 || QP < 2 || QP > 256) begin : g_places
        $error("front: CORES must be 1 to 16, LF and QP 2 to 256");
    end
    if ((LF & (LF - 1)) != 0 || (QP & (QP - 1)) != 0) begin : g_powers
        $error("front: LF and QP must be powers of two");
    end

    typedef struct packed {
        logic              enabled;
        logic [CORE_W-1:0] core;
        logic [LF_W-1:0]   local_function;
    } place_t;

    // The table by function: read by doorbells and, when none is in the way, by registers; and the reverse, by place.
    (* ram_style = "distributed" *) place_t     places[1 << FUNCTION_W];
    (* ram_style = "distributed" *) logic [7:0] functions[1 << PLACES_W];

    // Clearing after reset.
    logic [CLEAR_W:0] clear;
    wire              clearing = !clear[CLEAR_W];
    always_ff @(posedge clk) begin
        if (rst) clear <= '0;
        else if (clearing) clear <= clear + 1'b1;
    end

    // Doorbells. First cycle: what the offset says.
    logic               in_valid, in_right, in_cq;
    logic [FUNCTION_W-1:0] in_function;
    logic [QP_W-1:0]    in_queue;
    logic [15:0]        in_value;
    wire  [8:0]         qid = bar_offset[11:3];
    wire                right = bar_offset[1:0] == 2'b00 && qid != '0 && int'(qid) <= QP && int'(bar_function) < FUNCTIONS;
    always_ff @(posedge clk) begin
        in_valid    <= bar_valid && !rst;
        in_right    <= right && !clearing;
        in_function <= FUNCTION_W'(bar_function);
        in_queue    <= QP_W'(qid - 9'd1);
        in_cq       <= bar_offset[2];
        in_value    <= bar_data[15:0] | {16{|bar_data[31:16]}};
    end

    // Second: whose it is.
    wire place_t place = places[in_function];
    wire         pass = in_valid && in_right && place.enabled;
    logic [31:0] refused;
    always_ff @(posedge clk) begin
        for (int c = 0; c < CORES; c++) db_valid[c] <= pass && place.core == CORE_W'(c) && !rst;
        db_queue <= {place.local_function, in_queue};
        db_cq    <= in_cq;
        db_value <= in_value;
        if (rst) refused <= '0;
        else if (in_valid && !pass) refused <= refused + 1'b1;
    end

    // Interrupts.
    assign irq_function = functions[{irq_core, irq_local}];

    // Registers.
    wire place_t written = '{enabled: reg_wdata[63], core: reg_wdata[8+:CORE_W], local_function: reg_wdata[0+:LF_W]};
    wire         is_table = !reg_addr[11];
    wire         known = int'(reg_addr[10:0]) < FUNCTIONS;
    // A place that does not exist is not written: the function stays where it was, which a read shows.
    wire         exists = int'(reg_wdata[11:8]) < CORES && int'(reg_wdata[7:0]) < LF && reg_wdata[62:12] == '0;
    wire         access = reg_valid && reg_ready;
    wire         table_write = access && reg_write && is_table && known && exists;
    wire place_t shown = places[reg_addr[FUNCTION_W-1:0]];

    assign reg_ready = !clearing && !reg_rvalid;
    assign busy = clearing || in_valid || |db_valid || reg_valid || reg_rvalid;

    always_ff @(posedge clk) begin
        if (clearing) places[clear[FUNCTION_W-1:0]] <= '0;
        else if (table_write) places[reg_addr[FUNCTION_W-1:0]] <= written;
    end
    always_ff @(posedge clk) begin
        if (clearing) functions[clear[PLACES_W-1:0]] <= '0;
        else if (table_write && written.enabled) functions[{written.core, written.local_function}] <= reg_addr[7:0];
    end

    always_ff @(posedge clk) begin
        reg_rvalid <= access && !rst;
        reg_rdata  <= '0;
        if (is_table) begin
            if (known) reg_rdata <= {shown.enabled, 51'b0, 4'(shown.core), 8'(shown.local_function)};
        end else if (reg_addr[0]) reg_rdata <= {16'b0, 16'(SSDS), 16'(FUNCTIONS), 16'(CORES)};
        else reg_rdata <= 64'(refused);
    end
endmodule
`default_nettype wire
