// The functions' tables of 2 MiB pages: guest page to host page, in block RAM.
//
//   registers 8000h ──wr_*──► LF * PAGES rows {host address 47:21, writable, present}
//   translate ──a_* (always taken)──┐          │
//   prp_list  ──b_* (when a rests)──┴──► row ──┴──► present, writable, frame, one cycle later
//
// A guest's address is given as its page number and whether anything above the table is set (`high`): then nothing is present.
// Place: beside translate and prp_list, which share its one read port.
// Cycles: one; a look-up a cycle. A row that is written while it is looked up may give the old or the new one.
// Rows are absent until written; no reset clears them.
`default_nettype none

module page_table
    import millrace_pkg::*;
#(
    parameter int  LF     = 16,
    parameter int  PAGES  = 512,
    localparam int PAGE_W = $clog2(PAGES),
    localparam int ROW_W  = $clog2(LF) + PAGE_W
) (
    input  wire logic              clk,

    input  wire logic              wr_en,
    input  wire logic [14:0]       wr_addr,
    input  wire logic [63:0]       wr_data,

    input  wire logic              a_valid,
    input  wire logic [LF_W-1:0]   a_lf,
    input  wire logic [PAGE_W-1:0] a_page,
    input  wire logic              a_high,

    input  wire logic              b_valid,
    output      logic              b_ready,
    input  wire logic [LF_W-1:0]   b_lf,
    input  wire logic [PAGE_W-1:0] b_page,
    input  wire logic              b_high,

    output      logic              present,
    output      logic              writable,
    output      logic [26:0]       frame
);
    if (LF < 1 || LF > 16 || (LF & (LF - 1)) != 0) begin : g_lf
        $error("page_table: LF must be a power of two up to 16");
    end
    if (PAGES < 2 || (PAGES & (PAGES - 1)) != 0 || LF * PAGES > 32768) begin : g_pages
        $error("page_table: PAGES must be a power of two, LF * PAGES at most 32768");
    end

    (* ram_style = "block" *) logic [28:0] rows[LF * PAGES];
    initial rows = '{default: '0};
    logic [28:0]      row;
    logic             high;
    logic [ROW_W-1:0] at;

    assign b_ready = !a_valid;
    assign at      = a_valid ? ROW_W'({a_lf, a_page}) : ROW_W'({b_lf, b_page});

    always_ff @(posedge clk) begin
        if (wr_en) rows[ROW_W'(wr_addr)] <= {wr_data[47:21], wr_data[1:0]};
    end
    always_ff @(posedge clk) begin
        row  <= rows[at];
        high <= a_valid ? a_high : b_high;
    end
    assign present  = row[0] && !high;
    assign writable = row[1];
    assign frame    = row[28:2];

    wire unused = &{1'b0, b_valid, wr_addr, wr_data};
endmodule

`default_nettype wire
