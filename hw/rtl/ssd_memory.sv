// What disks read: their submission queues' entries, and translated PRP lists. 8 KiB, two block RAMs of 64 bits' width.
//
//                   lower 8 bytes of 16              upper 8 bytes
//   translate ──t_low──┐ (always)      translate ──t_high──┐ (always)
//   prp_list ──l_*─────┤               functions ──f_*─────┤ (when translate rests)
//                      ▼               prp_list ──l_*──────┤ (when both rest)
//                  512 rows                            512 rows       0–255: slot * 4 + beat; 256–511: list * 16 + beat
//                      └───────────────┬───────────────────┘
//   sdr_* ──► address ──► row ─────────┴──► sdd_*
//                └─► ring: which slot lies at this index of a disk's queue ◄── ring_* (submit)
//
// An entry lies at its slot, wherever the queues name it. Words that nobody writes (1, 2 and 7 of an entry) stay zero.
// Invariants: reads are answered in order, beat by beat; a disk reads an index only after its doorbell, so after `ring_*` and all writes.
// Cycles: a beat a cycle, the first 2 after the request.
`default_nettype none

module ssd_memory
    import millrace_pkg::*;
(
    input  wire logic              clk,
    input  wire logic              rst,

    input  wire logic              t_low_en,
    input  wire logic [SLOT_W+1:0] t_low_addr,
    input  wire logic [63:0]       t_low_data,
    input  wire logic              t_high_en,
    input  wire logic [SLOT_W+1:0] t_high_addr,
    input  wire logic [63:0]       t_high_data,

    input  wire logic              f_valid,
    output      logic              f_ready,
    input  wire logic [SLOT_W+1:0] f_addr,
    input  wire logic [63:0]       f_data,

    input  wire logic              l_valid,
    output      logic              l_ready,
    input  wire logic              l_high,   // which half
    input  wire logic [8:0]        l_addr,   // row
    input  wire logic [63:0]       l_data,

    input  wire logic              ring_en,
    input  wire logic [5:0]        ring_index,
    input  wire logic [SLOT_W-1:0] ring_slot,

    input  wire logic              sdr_valid,
    output      logic              sdr_ready,
    input  wire logic [13:0]       sdr_addr,
    input  wire logic [4:0]        sdr_beats,
    input  wire logic [7:0]        sdr_tag,
    output      logic              sdd_valid,
    input  wire logic              sdd_ready,
    output      logic [7:0]        sdd_tag,
    output      logic [127:0]      sdd_data,
    output      logic              sdd_last,

    output      logic              busy
);
    (* ram_style = "block" *) logic [63:0] low[512];
    (* ram_style = "block" *) logic [63:0] high[512];
    (* ram_style = "distributed" *) logic [SLOT_W-1:0] ring[64];
    initial low  = '{default: '0};
    initial high = '{default: '0};

    // ---- Writes
    wire        low_en    = t_low_en || (l_valid && !l_high);
    wire [8:0]  low_addr  = t_low_en ? {1'b0, t_low_addr} : l_addr;
    wire [63:0] low_data  = t_low_en ? t_low_data : l_data;
    wire        high_en   = t_high_en || f_valid || (l_valid && l_high);
    wire [8:0]  high_addr = t_high_en ? {1'b0, t_high_addr} : f_valid ? {1'b0, f_addr} : l_addr;
    wire [63:0] high_data = t_high_en ? t_high_data : f_valid ? f_data : l_data;
    assign f_ready = !t_high_en;
    assign l_ready = l_high ? !t_high_en && !f_valid : !t_low_en;

    always_ff @(posedge clk) begin
        if (low_en) low[low_addr] <= low_data;
    end
    always_ff @(posedge clk) begin
        if (high_en) high[high_addr] <= high_data;
    end
    always_ff @(posedge clk) begin
        if (ring_en) ring[ring_index] <= ring_slot;
    end

    // ---- Reads
    logic       active;
    logic [8:0] at;      // chip address, in beats: below 256 queues, above lists
    logic [4:0] left;
    logic [7:0] tag;
    wire        step     = active && (!sdd_valid || sdd_ready);
    wire        last     = left == 5'd1;
    wire [SLOT_W-1:0] named = ring[at[7:2]];
    wire [8:0]  row      = at[8] ? at : {1'b0, named, at[1:0]};
    assign sdr_ready = !active || (step && last);
    assign busy      = active || sdd_valid || sdr_valid;

    always_ff @(posedge clk) begin
        if (step) begin
            sdd_data[63:0]   <= low[row];
            sdd_data[127:64] <= high[row];
        end
    end
    always_ff @(posedge clk) begin
        if (rst) begin
            active    <= 1'b0;
            sdd_valid <= 1'b0;
        end else begin
            if (sdr_valid && sdr_ready) active <= 1'b1;
            else if (step && last) active <= 1'b0;
            if (step) sdd_valid <= 1'b1;
            else if (sdd_ready) sdd_valid <= 1'b0;
        end
    end
    always_ff @(posedge clk) begin
        if (sdr_valid && sdr_ready) begin
            at   <= sdr_addr[12:4];
            left <= sdr_beats;
            tag  <= sdr_tag;
        end else if (step) begin
            at   <= at + 9'd1;
            left <= left - 5'd1;
        end
        if (step) begin
            sdd_tag  <= tag;
            sdd_last <= last;
        end
    end

    wire unused = &{1'b0, sdr_addr[13], sdr_addr[3:0]};

`ifndef SYNTHESIS
    always_ff @(posedge clk) begin
        if (!rst && sdr_valid && sdr_ready)
            assert (sdr_beats inside {[1:16]} && !sdr_addr[13] && sdr_addr[3:0] == '0)
                else $fatal(1, "ssd_memory: a disk reads %0d beats at %h", sdr_beats, sdr_addr);
    end
`endif
endmodule

`default_nettype wire
