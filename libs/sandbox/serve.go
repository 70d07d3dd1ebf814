package sandbox

import "encoding/json"

// The protocol of `rollout-sandbox serve`: frames of a length in 4 bytes, big endian, and a JSON
// object, over standard input and output. Requests run concurrently; a response carries the id of
// its request. The end of standard input closes every box.
//
//	probe                                      -> Report
//	warm    {spec, count, prestart?}           -> {}
//	run     {...spec, ...command}              -> Result; the box is closed
//	open    {spec}                             -> {box, process?}; process: the prestarted command
//	exec    {box, command}                     -> Result
//	start   {box, command}                     -> {process}; its output and end come as events
//	write   {process, data, eof}               -> {}
//	kill    {process}                          -> {}
//	reset   {box}                              -> {box, process?}; a new box under the same id
//	close   {box}                              -> {}
//	cancel  {request}                          -> {}; kills the command of a run or an exec

// Request is a frame from the client.
type Request struct {
	ID     int64           `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params,omitempty"`
}

// Response is a frame to the client: the answer to a request, or an event of a process.
type Response struct {
	ID     int64  `json:"id,omitempty"`
	Result any    `json:"result,omitempty"`
	Error  *Error `json:"error,omitempty"`
	Event  *Event `json:"event,omitempty"`
}

// Event is output or the end of a started process.
type Event struct {
	Process string  `json:"process"`
	Stream  string  `json:"stream,omitempty"` // stdout or stderr
	Data    Data    `json:"data,omitempty"`
	Result  *Result `json:"result,omitempty"` // the end, after all output
	Error   *Error  `json:"error,omitempty"`  // the end, if the box was lost
}
