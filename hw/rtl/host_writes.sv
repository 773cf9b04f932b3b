// Joins completion's entries and interrupts' messages into the one ordered channel to the host.
//
//     completion ── cqe_* ──┐
//     interrupts ── msi_* ──┴──► hwr_* ──► host
//
// Both come from registers, so nothing is kept here but whose turn it is: what is taken from either has left the core, and a queue
// that shows nothing in flight has nothing left to write. Entries first: an interrupt that waits covers them as well. Invariants:
// what is offered stays until it is taken; the order is that of taking. One write a cycle, none of them later.
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
    logic waits;                        // a message was offered and is not taken yet
    wire  message = waits || !cqe_valid;
    always_ff @(posedge clk) waits <= !rst && message && msi_valid && !hwr_ready;

    assign cqe_ready = hwr_ready && !message;
    assign msi_ready = hwr_ready && message;
    assign hwr_valid = message ? msi_valid : cqe_valid;
    assign hwr_kind  = message;
    // Of a message only the address' lower bits mean something; what else is there is left as it lies.
    assign hwr_addr  = {cqe_addr[63:24], message ? 24'({msi_function, msi_vector}) : cqe_addr[23:0]};
    assign hwr_data  = cqe_data;
    assign hwr_bytes = 5'd16;
endmodule
`default_nettype wire
