// Joins completion's entries and interrupts' messages into the one ordered channel to the host.
//
//     completion ── cqe_* ──┐
//     interrupts ── msi_* ──┴──► one register ── hwr_* ──► host
//
// Entries first: an interrupt that waits covers them as well. Invariant: what is taken goes out in the order of taking. One
// write every 2 cycles.
`default_nettype none

module host_writes
    import millrace_pkg::*;
(
    input  wire logic               clk,
    input  wire logic               rst,

    input  wire logic               cqe_valid,
    output      logic               cqe_ready,
    input  wire logic [63:0]        cqe_addr,
    input  wire logic [127:0]       cqe_data,

    input  wire logic               msi_valid,
    output      logic               msi_ready,
    input  wire logic [LF_W-1:0]    msi_function,
    input  wire logic [7:0]         msi_vector,

    output      logic               hwr_valid,
    input  wire logic               hwr_ready,
    output      logic               hwr_kind,
    output      logic [63:0]        hwr_addr,
    output      logic [127:0]       hwr_data,
    output      logic [4:0]         hwr_bytes
);
    // Either is taken only into an empty register.
    assign cqe_ready = !hwr_valid;
    assign msi_ready = !hwr_valid && !cqe_valid;

    always_ff @(posedge clk) begin
        if (rst) begin
            hwr_valid <= 1'b0;
        end else if (!hwr_valid) begin
            hwr_valid <= cqe_valid || msi_valid;
        end else if (hwr_ready) begin
            hwr_valid <= 1'b0;
        end
        if (!hwr_valid) begin
            hwr_kind <= !cqe_valid;
            hwr_addr <= cqe_valid ? cqe_addr : 64'({msi_function, msi_vector});
            hwr_data <= cqe_valid ? cqe_data : 128'd0;
        end
    end
    assign hwr_bytes = 5'd16;
endmodule
`default_nettype wire
