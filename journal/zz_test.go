package journal
import ("testing";"sync";"sync/atomic";"waybill/journal/internal/hooks";"golang.org/x/sys/unix";"os")
func BenchmarkZZNoSync(b *testing.B){
	opt := testOptions(tempDir(b), &hooks.Hooks{NoSync:true}); opt.Hooks.CheckCache=false
	j,_ := openWith(b,opt)
	body := make([]byte,1024)
	var left atomic.Int64; left.Store(int64(b.N)); b.ReportAllocs(); b.ResetTimer()
	var wg sync.WaitGroup
	for range 64 { wg.Go(func(){ for left.Add(-1)>=0 { id:=newID(); j.Append(bg,toDispatch(id,"ci","","f")); j.Append(bg,toResult(id,body)) } }) }
	wg.Wait()
}
func BenchmarkZZFdatasync(b *testing.B){
	f,_ := os.Create(b.TempDir()+"/x"); f.Write(make([]byte,1<<20)); f.Sync(); buf:=make([]byte,128)
	for i:=0;b.Loop();i++ { f.WriteAt(buf,int64(i%8000)*128); unix.Fdatasync(int(f.Fd())) }
}
