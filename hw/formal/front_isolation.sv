// front.sv: a function's doorbell page reaches the queues of its own place and no other's. When a core sees a doorbell for a local
// function, it came, two cycles before, from the page of a function that the table said is enabled and has this place; and as long as
// the control processor gives no place twice, that is one function.
//
// What is assumed: that the control processor gives no place twice. Guests may write whatever they like, wherever they like.
// Proved for 4 functions, 2 cores of 4 local functions, 2 queue pairs each.
//
// steps: 4
// within: 24
`default_nettype none

module front_isolation #(
    parameter int FUNCTIONS = 4,
    parameter int CORES     = 2,
    parameter int LF        = 4,
    parameter int QP        = 2,
    localparam int QUEUE_W  = $clog2(LF) + $clog2(QP)
) (
    input  wire              clk,
    input  wire              rst,
    input  wire              bar_valid,
    input  wire  [7:0]       bar_function,
    input  wire  [11:0]      bar_offset,
    input  wire  [31:0]      bar_data,
    input  wire              irq_core,
    input  wire  [1:0]       irq_local,
    input  wire              reg_valid,
    input  wire              reg_write,
    input  wire  [11:0]      reg_addr,
    input  wire  [63:0]      reg_wdata,
    output logic             reached
);
    logic [CORES-1:0]   db_valid;
    logic [QUEUE_W-1:0] db_queue;
    logic               db_cq, reg_ready, reg_rvalid, busy;
    logic [15:0]        db_value;
    logic [7:0]         irq_function;
    logic [63:0]        reg_rdata;
    front #(.FUNCTIONS(FUNCTIONS), .CORES(CORES), .LF(LF), .QP(QP)) dut (.*);

    // The table as the control processor wrote it, kept beside the design's own.
    typedef struct packed {
        logic       enabled;
        logic       core;
        logic [1:0] local_function;
    } place_t;
    place_t [FUNCTIONS-1:0] table_;
    wire place_t written = '{enabled: reg_wdata[63], core: reg_wdata[8], local_function: reg_wdata[1:0]};
    wire         writes  = reg_valid && reg_ready && reg_write && !reg_addr[11] && reg_addr[10:0] < 11'(FUNCTIONS) && reg_wdata[62:12] == '0
                           && reg_wdata[11:8] < 4'(CORES) && reg_wdata[7:0] < 8'(LF);
    logic        twice; // the place is another's
    always_comb begin
        twice = 1'b0;
        for (int f = 0; f < FUNCTIONS; f++) begin
            if (table_[f].enabled && written == table_[f] && 11'(f) != reg_addr[10:0]) twice = 1'b1;
        end
    end

    // Whose page was written, one and two cycles before, and what the table said between.
    logic       rang, rang_valid, came, came_valid;
    logic [7:0] rang_function, came_function;
    place_t     came_place;
    always_ff @(posedge clk) begin
        if (rst) table_ <= '0;
        else if (writes) table_[reg_addr[1:0]] <= written;
        {rang, rang_function} <= {bar_valid, bar_function};
        {came, came_function} <= {rang, rang_function};
        came_place            <= table_[rang_function[1:0]];
        rang_valid            <= !rst;
        came_valid            <= rang_valid && !rst;
    end

    always_ff @(posedge clk) begin
        assume (!(writes && written.enabled && twice));
        if (!rst) begin
            if (dut.clearing) assert (table_ == '0);
            for (int f = 0; f < FUNCTIONS; f++) begin
                if (!dut.clearing) assert (dut.places[f] == table_[f]);
                else if (f < 32'(dut.clear)) assert (dut.places[f] == '0);
                for (int g = 0; g < f; g++) assert (!table_[f].enabled || !table_[g].enabled || table_[f] != table_[g]);
            end
            assert (db_valid != 2'b11);
            if (rang_valid) assert (!dut.in_valid || rang);
            if (rang_valid) assert (!dut.in_valid || !dut.in_right || (rang_function < 8'(FUNCTIONS) && dut.in_function == rang_function[1:0]));
            if (came_valid) begin
                for (int c = 0; c < CORES; c++) begin
                    if (db_valid[c]) assert (came && came_function < 8'(FUNCTIONS) && came_place == {1'b1, 1'(c), db_queue[QUEUE_W-1-:2]});
                end
            end
        end
    end
    assign reached = !rst && came_valid && db_valid[1] && table_[0].enabled && table_[1].enabled;
endmodule
`default_nettype wire
