// What the modules of a core pass to each other (docs/hardware.md). What is not yet known is zero.
// No module uses all of it, and `queue` is what NVMe calls it: nothing in C++ sees the member.
// verilator lint_off UNUSEDPARAM
// verilator lint_off SYMRSVDWORD
package millrace_pkg;
    localparam int SLOT_W  = 6;  // 64 slots
    localparam int QUEUE_W = 6;  // 16 local functions, 4 queue pairs each
    localparam int LF_W    = 4;
    localparam int SSD_MAX = 16;

    // NVM Express I/O opcodes (NVM Command Set 3).
    localparam logic [7:0] OP_FLUSH = 8'h00, OP_WRITE = 8'h01, OP_READ = 8'h02, OP_COMPARE = 8'h05, OP_WRITE_ZEROES = 8'h08;

    // A status as in bits 15:1 of an entry's last word (Base 4.2.3): DNR, More, CRD, SCT, SC.
    typedef logic [14:0] status_t;
    localparam status_t ST_SUCCESS             = 15'h0000;
    localparam status_t ST_INVALID_OPCODE      = 15'h4001;
    localparam status_t ST_INVALID_FIELD       = 15'h4002;
    localparam status_t ST_DATA_TRANSFER_ERROR = 15'h4004;
    localparam status_t ST_INVALID_NAMESPACE   = 15'h400B;
    localparam status_t ST_PRP_OFFSET_INVALID  = 15'h4013;
    localparam status_t ST_LBA_OUT_OF_RANGE    = 15'h4080;
    localparam status_t ST_READ_ONLY           = 15'h4020; // Namespace is Write Protected
    localparam status_t ST_INTERNAL_ERROR      = 15'h0006; // no disk is left: to be tried again

    // An entry as the guest wrote it: from decode to translate.
    typedef struct packed {
        logic [SLOT_W-1:0]  slot;
        logic [QUEUE_W-1:0] queue;   // {local function, qid - 1}
        logic [7:0]         opcode;
        logic [31:0]        nsid;
        logic [63:0]        prp1;
        logic [63:0]        prp2;
        logic [63:0]        slba;
        logic [31:0]        cdw12;
        logic               ended;   // goes no further: `status` is its end
        logic               late;    // the same, unless the storage functions refuse it: their checks come first
        status_t            status;
    } command_t;

    // A command whose words lie in memories, at its slot: from translate through functions and prp_list to submission.
    typedef struct packed {
        logic [SLOT_W-1:0]  slot;
        logic [QUEUE_W-1:0] queue;
        logic [SSD_MAX-1:0] ssds;    // disks it goes to: one, or several (fan out); from functions on
        logic               ended;
        logic               late;    // until functions
        status_t            status;
    } passed_t;

    // What slots.sv keeps of a command in flight.
    typedef struct packed {
        logic [QUEUE_W-1:0] queue;
        logic [15:0]        cid;
    } owner_t;

    // FastPath: 32 requests, and 32 commands, of a space. A request as it waits to be cut into commands.
    localparam logic [1:0] FP_GOOD = 2'd0, FP_OPCODE = 2'd1, FP_FIELD = 2'd2, FP_TRANSFER = 2'd3;
    typedef struct packed {
        logic [1:0]  wrong;     // FP_*: its end, without a command
        logic [3:0]  opcode;
        logic        durable;
        logic [27:0] offset;    // in the buffer, in units of 4 bytes
        logic [47:0] lba;
        logic [15:0] blocks_z;  // zero's based
    } request_t;
endpackage
// verilator lint_on SYMRSVDWORD
// verilator lint_on UNUSEDPARAM
